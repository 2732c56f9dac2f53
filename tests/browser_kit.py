"""A headless Chromium over its debugging pipe: open a page, run JavaScript in it, take a picture."""
from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

CHROMIUM = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--remote-debugging-pipe")


class Browser:
    """Messages are JSON ended by a zero byte: the browser reads descriptor 3 and writes descriptor 4."""

    def __init__(self) -> None:
        assert CHROMIUM is not None
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_browser, from_browser = os.pipe(), os.pipe()
        # Moved out of the way first, since 3 and 4 may be among them.
        ends = [os.dup(to_browser[0]), os.dup(from_browser[1])]
        command = f"exec 3<&{ends[0]} 4>&{ends[1]}; exec \"$@\""
        self._process = subprocess.Popen(
            ["bash", "-c", command, "bash", CHROMIUM, *FLAGS, f"--user-data-dir={self._folder.name}", "about:blank"],
            pass_fds=ends, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for end in (*ends, to_browser[0], from_browser[1]):
            os.close(end)
        self._out, self._in, self._rest, self._id = to_browser[1], from_browser[0], b"", 0
        self._session: str | None = None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._call("Page.enable")
        self.errors: list[str] = []
        self._call("Runtime.enable")

    def open(self, url: str, width: int, height: int = 800) -> None:
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self._call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, script: str, seconds: float = 30.0) -> Any:
        end = time.monotonic() + seconds
        while not (value := self.run(script)):
            assert time.monotonic() < end, f"never true: {script}"
            time.sleep(0.05)
        return value

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        os.close(self._out)
        os.close(self._in)
        self._process.kill()
        self._process.wait(20)
        self._folder.cleanup()

    def _call(self, method: str, **params: Any) -> Any:
        self._id += 1
        message = {"id": self._id, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                data = os.read(self._in, 1 << 16)
                assert data, "the browser has ended"
                self._rest += data
            text, _, self._rest = self._rest.partition(b"\0")
            answer = json.loads(text)
            if answer.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(answer["params"]))
            if answer.get("id") == self._id:
                assert "error" not in answer, answer
                return answer["result"]
