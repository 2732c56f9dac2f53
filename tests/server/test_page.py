"""The page at / in a headless Chromium: asking, streaming, stopping, and room at both widths."""
from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from browser_kit import CHROMIUM, Browser
from ridgeline import LLM
from server_kit import Running, until
from tiny_checkpoint import write_checkpoint

in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (Debian's package chromium)")
ASK = """(async () => { document.getElementById('most').value = %d; document.getElementById('temperature').value = 0;
document.getElementById('text').value = %r; document.getElementById('form').requestSubmit(); })()"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    browser = Browser()
    yield browser
    browser.close()


def test_the_page_needs_nothing_from_elsewhere(http: httpx.Client) -> None:
    answer = http.get("/")
    assert answer.headers["content-type"].startswith("text/html") and "default-src 'self'" in answer.headers[
        "content-security-policy"]
    assert not re.findall(r"""(?:src|href|url\()\s*=?\s*["']?(?:https?:)?//""", answer.text.replace("http://www.w3.org", ""))


@in_browser
@pytest.mark.parametrize("width", [400, 1280])
def test_a_conversation_in_the_page(browser: Browser, server: Running, width: int, tmp_path: Path) -> None:
    browser.open(server.url, width)
    browser.until("typeof look !== 'undefined' && document.getElementById('mode').textContent === 'chat'")
    assert browser.run("document.getElementById('model').textContent") == "tiny"
    browser.run(ASK % (24, "The sea"))
    browser.until("document.body.dataset.done === '1'")
    shown = browser.run("document.querySelector('.answer').textContent")
    body = {"messages": [{"role": "user", "content": "The sea"}], "max_tokens": 24, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body).json()
    assert shown == answer["choices"][0]["message"]["content"]
    assert browser.run("document.getElementById('tokens').textContent") == str(answer["usage"]["completion_tokens"])
    for name in ("ttft", "itl"):
        assert re.fullmatch(r"[\d.]+ ms", browser.run(f"document.getElementById('{name}').textContent")), name
    assert float(browser.run("document.getElementById('rate').textContent")) > 1
    assert browser.run("document.getElementById('running').textContent").isdigit()
    assert browser.run("document.getElementById('kv').textContent").endswith(" %")
    for stage in ("prefill", "decode"):
        shown = browser.until(f"document.getElementById('{stage}-limit').textContent !== '–' && "
                              f"document.getElementById('{stage}-limit').textContent")
        assert re.fullmatch(r"(compute|weights|KV cache|overhead) \d+ %", shown), shown
    # Nothing is wider than the window, and the form can be seen.
    assert browser.run("document.documentElement.scrollWidth") <= width
    box: Any = browser.run("(() => { const b = document.getElementById('send').getBoundingClientRect(); "
                           "return [b.left, b.top, b.right, b.bottom]; })()")
    assert 0 <= box[0] < box[2] <= width and 0 <= box[1] < box[3] <= 800
    browser.picture(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 5000 and not browser.errors


@in_browser
def test_plain_completion_stop_and_errors(browser: Browser, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, max_position_embeddings=4096)
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<bos>"}')
    llm = LLM(folder, threads=1)
    llm.engine.eos_token_ids = ()
    with Running(llm, model="tiny") as server:
        browser.open(server.url, 1280)
        browser.until("typeof look !== 'undefined' && document.getElementById('mode').textContent === 'plain completion'")
        browser.run(ASK % (4000, "The sea"))
        browser.until("Number(document.getElementById('tokens').textContent) > 3")
        assert llm.engine.scheduler.running
        browser.run("document.getElementById('stop').click()")
        browser.until("document.body.dataset.done === '1'")
        until(lambda: not llm.engine.scheduler.running)
        assert browser.run("document.querySelector('.answer').textContent").startswith("The sea")
        browser.run(ASK % (5, "sea " * 5000))
        assert "fit the context" in browser.until("(document.querySelector('.failed') || {}).textContent")
