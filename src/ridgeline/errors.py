"""Everything that can go wrong at an edge, as one tree.

    RidgelineError
     +- ConfigError          a flag or configuration value, alone or in combination
     +- ModelError           the model cannot be served
     |   +- ModelNotFound    no such folder, file, hub id or packaged model
     |   +- CorruptFile      a file is damaged: names the file, the tensor or field, what was expected
     |   +- UnsupportedModel an architecture or variant that has no implementation; the known ones are listed
     +- RequestError         one request is wrong; no other request notices
     |   +- InvalidPrompt    empty, not valid text, token ids out of range
     |   |   +- PromptTooLong
     |   +- InvalidParams    a sampling parameter or a contradiction between two
     +- PeerError            a server that is measured does not answer, or not as its protocol says
     +- EngineError          the engine cannot go on with a request that was valid
         +- OutOfMemory      the cache cannot hold what a single request needs

Every message names what was wrong, the value found and what is allowed. `assert` is for our own invariants.
"""
from __future__ import annotations


class RidgelineError(Exception):
    """Base of every error that a user can meet."""


class ConfigError(RidgelineError):
    pass


class ModelError(RidgelineError):
    pass


class ModelNotFound(ModelError):
    pass


class CorruptFile(ModelError):
    pass


class UnsupportedModel(ModelError):
    pass


class RequestError(RidgelineError):
    pass


class InvalidPrompt(RequestError):
    pass


class PromptTooLong(InvalidPrompt):
    pass


class InvalidParams(RequestError):
    pass


class PeerError(RidgelineError):
    pass


class EngineError(RidgelineError):
    pass


class OutOfMemory(EngineError):
    pass
