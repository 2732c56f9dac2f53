"""Calls written as JSON objects: {"name": ..., "arguments": {...}}, read as they come."""
from __future__ import annotations

import json
from abc import abstractmethod

from ridgeline.server.parsers.scanner import NotACall, Parser, Sink, Steps

ARGUMENT_KEYS = ("arguments", "parameters")


class Cut(NotACall):
    """The text, or its frame, ended inside the object."""


class JsonCallParser(Parser):
    """For formats whose calls are JSON objects or have JSON arguments.

    closes: the stop marker closes a call; else it opens the next.
    """

    closes = True

    def json_value(self, sink: Sink, stop: str = "") -> Steps[None]:
        """Give one JSON value at the cursor to `sink`. Brackets and quotes are followed, the rest is not checked.

        stop: a marker that ends a value that is not whole; raises Cut there, as at the end of the text.
        """
        depth, quoted, escaped, scalar = 0, False, False, False
        no_stop = False                                  # the character at the cursor begins no stop marker
        while True:
            text, at = self._text, self._at
            done = check = False
            while at < len(text) and not done and not check:
                c = text[at]
                if quoted:
                    quoted = escaped or c != '"'
                    escaped = c == "\\" and not escaped
                    done = not quoted and not depth
                elif stop and c == stop[0] and not no_stop:
                    check = True
                    continue
                elif c == '"':
                    quoted = True
                elif c in "{[":
                    depth += 1
                elif c in "}]" and depth:
                    depth -= 1
                    done = not depth
                elif not depth and (c in ",}]" or c.isspace()):
                    break
                elif not depth:
                    scalar = True
                no_stop = False
                at += 1
            sink(text[self._at:at])
            self._at = at
            if done or (at < len(text) and not check and scalar):
                return
            if check:
                if (yield from self.looking_at(stop)):
                    raise Cut
                no_stop = True
            elif at < len(text):
                raise NotACall                           # a bracket or comma where a value should be
            elif self._ended:
                if scalar and not depth:
                    return
                raise Cut
            else:
                yield

    def json_string(self, stop: str = "") -> Steps[str]:
        """The string at the cursor, decoded. raises NotACall if there is none, Cut if it is not whole."""
        if (yield from self.peek()) != '"':
            raise NotACall if (yield from self.peek()) else Cut
        parts: list[str] = []
        yield from self.json_value(parts.append, stop)
        try:
            return str(json.loads("".join(parts), strict=False))
        except ValueError as error:
            raise NotACall from error

    def json_call(self, stop: str = "", *, bare: bool = True) -> Steps[bool]:
        """The call at the cursor, which is kept; tells it and returns True, or shows the kept text as content: False.

        stop: the marker that closes the format's frame, which is found even if the object is not whole.
        bare: an object without arguments is a call.
        """
        assert self._mark is not None, "keep the text first"
        before, whole = self.calls, False
        try:
            if (yield from self.take("{")):
                whole = yield from self._members(stop, bare)
        except NotACall:
            whole = False
        if self.calls == before:
            self.content(self.kept())
            return False
        if whole:
            self.kept()
            self.end()
        else:
            yield from self._cut_before(stop)
        return True

    def _cut_before(self, stop: str) -> Steps[None]:
        """The call begun last is not whole; a marker that closes its frame belongs to its text."""
        if stop and self.closes:
            yield from self.take(stop)
        self.cut()

    def _members(self, stop: str, bare: bool) -> Steps[bool]:
        """The members of an object, behind its brace. True once the arguments are whole, whatever follows them."""
        name, early, told = None, None, False
        while True:
            try:
                yield from self.skip_space()
                if (yield from self.take("}")):
                    break
                yield from self.take(",")
                yield from self.skip_space()
                key = yield from self.json_string(stop)
                yield from self.skip_space()
                if not (yield from self.take(":")):
                    raise NotACall
                yield from self.skip_space()
                if key == "name" and name is None:
                    name = yield from self.json_string(stop)
                    if early is not None:
                        self.start(name)
                        self.arguments(early)
                        told = True
                elif key in ARGUMENT_KEYS and not told and early is None:
                    early, told = yield from self._arguments(name, stop)
                else:
                    yield from self.json_value(lambda text: None, stop)
            except NotACall:
                if told:
                    return True
                raise
        if not told and name is not None and bare:
            self.start(name)
            self.arguments("{}")
            told = True
        return told

    def _arguments(self, name: str | None, stop: str) -> Steps[tuple[str | None, bool]]:
        """The value of the arguments: told as it comes, or held (and returned) where the name is not known yet."""
        if (yield from self.peek()) == "{" and name is not None:
            self.start(name)
            yield from self.json_value(self.arguments, stop)
            return None, True
        parts: list[str] = []
        yield from self.json_value(parts.append, stop)
        text = "".join(parts)
        if text.startswith('"'):
            text = _unquoted(text)
        elif text == "null":
            text = "{}"
        if not text.startswith("{"):
            raise NotACall
        if name is None:
            return text, False
        self.start(name)
        self.arguments(text)
        return None, True

    def named_call(self, name: str, id: str | None = None, stop: str = "") -> Steps[bool]:
        """The JSON object at the cursor as the arguments of a call of `name`; the text kept so far is its beginning.

        Returns False, with the kept text shown as content, where there is no object or no name.
        """
        if not name or (yield from self.peek()) != "{":
            self.content(self.kept())
            return False
        self.start(name, id)
        try:
            yield from self.json_value(self.arguments, stop)
        except Cut:
            yield from self._cut_before(stop)
            return True
        self.kept()
        self.end()
        return True

    @abstractmethod
    def run(self) -> Steps[None]: ...


def _unquoted(text: str) -> str:
    """Some models write the arguments as a string that contains JSON."""
    try:
        inner = json.loads(text, strict=False)
        json.loads(inner)
    except ValueError as error:
        raise NotACall from error
    return str(inner).strip()
