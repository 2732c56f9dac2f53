"""benchmarks.servers: both servers get the same load by the same client, and what fails says why."""
from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from benchmarks.servers import compare, processes

from tiny_checkpoint import write_checkpoint

LOAD = processes.Load(clients=2, input_len=20, output_len=4, requests=4)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("side_by_side"), max_position_embeddings=512))


def a_peer(tmp_path: Path) -> str:
    """A program that takes llama-server's flags and is this server."""
    program = tmp_path / "llama-server"
    program.write_text(f"""#!{sys.executable}
import sys
from ridgeline.cli import main
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert given["-np"] == "2" and given["-t"] == "1" and given["-c"] == "512", given
sys.exit(main(["serve", given["-m"], "--host", given["--host"], "--port", given["--port"], "--max-num-seqs", given["-np"],
               "--threads", given["-t"], "--disable-access-log"]))
""")
    program.chmod(0o755)
    return str(program)


@pytest.mark.slow
def test_two_servers_in_turn(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = compare.main([tiny, "--llama-server", a_peer(tmp_path), "--clients", "2", "--input-len", "20", "--output-len", "60",
                         "--num-prompts", "4", "--repeat", "1", "--threads", "1", "--json"])
    text, _, last = capsys.readouterr().out.rstrip().rpartition("\n")
    result = json.loads(last)
    assert code == 0 and "ridgeline / llama-server" in text and "p50 TPOT, ms" in text
    assert {name: len(runs) for name, runs in result["runs"].items()} == {"ridgeline": 1, "llama-server": 1}
    ours, theirs = result["medians"]["ridgeline"], result["medians"]["llama-server"]
    assert min(*ours.values(), *theirs.values()) > 0
    assert result["ratios"]["llama-server"] == {name: ours[name] / theirs[name] for name in ours}


def test_answers_of_one_chunk_have_no_figures() -> None:
    summary = {"completed": 3, "output_tokens_per_s": 5.0,
               "latencies": {"ttft": {"percentiles": {"50": 0.1}}, "tpot": {"percentiles": {"50": None}}}}
    with pytest.raises(processes.ServerError, match="3 answers tell of no tpot"):
        compare.figures({"summary": summary})


def test_the_context_holds_prompt_and_answer() -> None:
    assert processes.Load(16, 430, 128, 48).context == 768


@pytest.mark.parametrize("program, message", [
    ("/no/such/llama-server", "/no/such/llama-server cannot be run: No such file"),
    (sys.executable, "llama-server: ended with code [12] before it was ready\n.*python")])
def test_a_server_that_does_not_start_says_why(tiny: str, program: str, message: str) -> None:
    server = processes.llama_server(program, tiny, LOAD, 1, ["--no-such-flag"])
    with pytest.raises(processes.ServerError, match=message), server.running():
        pass


def test_a_client_that_meets_no_server_is_told() -> None:
    with pytest.raises(processes.ServerError, match="no server answers"):
        processes.measure(f"http://127.0.0.1:{processes.free_port()}", LOAD)


def test_mistakes_end_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        compare.main(["gemma3-270m", "--clients", "0"])
    assert "--clients is 0; it must be at least 1" in capsys.readouterr().err
