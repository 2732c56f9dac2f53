"""What schemathesis makes of the server's own OpenAPI document: no request whatever is answered with a 5xx."""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ridgeline import LLM
from server_kit import Running

schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis (pip install 'ridgeline[dev]')")

EXAMPLES = 100                    # of each operation, valid and invalid


@pytest.fixture(scope="module")
def short(folder: Path) -> Iterator[Running]:
    """A context of 48 tokens, so that a request for all there is ends soon."""
    with Running(LLM(folder, threads=1, max_model_len=48), model="tiny") as server:
        yield server
        server.wait_idle()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
def test_no_request_is_the_servers_fault(short: Running, mode: str) -> None:
    """mode: bodies as the document has them, or ones that break it somewhere."""
    schema = schemathesis.openapi.from_url(f"{short.url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    assert {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/tokenize",
            "/metrics"} <= {operation.path for operation in operations}
    seen: set[int] = set()
    with httpx.Client(base_url=short.url, timeout=60) as http:
        usual = {"prompt": "The sea", "temperature": 0, "max_tokens": 5}
        expected = http.post("/v1/completions", json=usual).json()["choices"]
        for operation in operations:
            strategy = _cases(operation, mode)
            if strategy is not None:
                _fuzz(strategy, seen)
        assert http.post("/v1/completions", json=usual).json()["choices"] == expected
    assert 400 in seen and (200 in seen or mode == "NEGATIVE")


def _cases(operation: schemathesis.APIOperation, mode: str) -> st.SearchStrategy[schemathesis.Case] | None:
    """None where an operation takes no body, so nothing that breaks the document."""
    if mode == "NEGATIVE" and not list(operation.body):
        return None
    return operation.as_strategy(generation_mode=getattr(schemathesis.GenerationMode, mode))


def _fuzz(strategy: st.SearchStrategy[schemathesis.Case], seen: set[int]) -> None:
    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None,
              suppress_health_check=list(HealthCheck))
    @given(case=strategy)
    def send(case: schemathesis.Case) -> None:
        answer = case.call()
        seen.add(answer.status_code)
        assert answer.status_code < 500, (case.as_curl_command(), answer.text)
        assert '"code":"engine' not in answer.text, (case.as_curl_command(), answer.text)

    send()
