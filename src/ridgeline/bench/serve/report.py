"""A run for a person at a terminal, as markdown, and for programs."""
from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ridgeline.bench.serve.metrics import METRICS, SYMBOLS
from ridgeline.errors import ConfigError
from ridgeline.report.text import Rows, markdown_table, ms, number, span, table, write

KIND, VERSION = "ridgeline bench serve", 1


def verdict(result: dict[str, Any]) -> str:
    """One sentence: what the server carried, and how it felt."""
    cells = result["cells"]
    if len(cells) > 1 and (found := result.get("knee")) is not None:
        cell = cells[found["cell"]]
        return f"{found['text']}: {_carried(cell)}."
    return f"{cells[-1]['arrivals']['name']}: {_carried(cells[-1])}."


def _carried(cell: dict[str, Any]) -> str:
    summary = cell["summary"]
    if not summary["completed"]:
        return f"no request was answered ({summary['first_error'] or 'none was sent'})"
    parts = [f"{number(summary['output_tokens_per_s'])} output tokens/s"]
    for name in ("ttft", "tpot"):
        middle = summary["latencies"].get(name, {}).get("percentiles", {}).get("50")
        if middle is not None:
            parts.append(f"median {METRICS[name].title} {ms(middle)} ms")
    if summary.get("attainment") is not None:
        parts.append(f"{summary['attainment']:.1%} of requests within the objectives")
    return ", ".join(parts) + f"; {summary['completed']} of {summary['completed'] + summary['failed']} requests answered"


def latency_rows(cell: dict[str, Any]) -> Rows:
    """A heading and a row for each latency, in ms."""
    latencies = cell["summary"]["latencies"]
    percentiles = next(iter(latencies.values()))["percentiles"] if latencies else {}
    rows = [["ms", "count", "mean", "95 % interval", *(f"p{q}" for q in percentiles), "median's interval", "formula"]]
    for name, found in latencies.items():
        rows.append([METRICS[name].title, str(found["count"]), ms(found["mean"]), span(found["mean_interval"]),
                     *(ms(value) if value is not None or not found["count"] else "n<" + str(_needed(float(q)))
                       for q, value in found["percentiles"].items()),
                     span(found["median_interval"]), METRICS[name].formula])
    return rows


def _needed(q: float) -> int:
    return round(100 / min(q, 100 - q))


def load_rows(cell: dict[str, Any]) -> Rows:
    """Name, value, formula of what is counted over the cell."""
    s = cell["summary"]
    window = s["steady_window_s"]
    rows = [
        ["duration", f"{number(s['duration_s'])} s", "last tN - first t_sched"],
        ["requests/s", number(s["requests_per_s"]), "answered requests / duration"],
        ["output tokens/s", number(s["output_tokens_per_s"]), f"tokens of answers, by {s['tokens_counted']}, / duration"],
        ["total tokens/s", number(s["total_tokens_per_s"]), "with the prompts' tokens, by usage"],
        ["steady tokens/s", number(s["steady_output_tokens_per_s"]),
         "no steady window" if window is None else f"output tokens within {window[0]:.2f} to {window[1]:.2f} s / its length"],
        ["in flight", f"{number(s['mean_concurrency'])} mean, {s['peak_concurrency']} peak", "sent and not ended"],
        ["prefix hits", "unknown" if s["prefix_hit_rate"] is None else f"{s['prefix_hit_rate']:.1%}",
         "prompt tokens from the server's prefix cache / prompt tokens"],
        ["client lag", f"{ms(s['client']['send_lateness_p99_s'])} / {ms(s['client']['wakeup_lateness_p99_s'])} ms",
         "p99 of lateness of sends / of wake-ups of this client"],
    ]
    if s.get("attainment") is not None:
        parts = ", ".join(f"{name} {share:.1%}" for name, share in s["attainment_by_objective"].items())
        rows += [["goodput", f"{number(s['goodput_requests_per_s'])} requests/s", "requests within all objectives / duration"],
                 ["attainment", f"{s['attainment']:.1%}", f"requests within all objectives / all, errors too ({parts})"]]
    return rows


def curve_rows(result: dict[str, Any]) -> Rows:
    """A row for each cell of a sweep."""
    rows = [["load", "requests/s", "output tokens/s", "TTFT p50", "TPOT p50", "E2E p50", "failed", "attainment", "grade", ""]]
    knee = (result.get("knee") or {}).get("cell")
    for index, cell in enumerate(result["cells"]):
        s = cell["summary"]

        def middle(name: str, latencies: dict[str, Any] = s["latencies"]) -> str:
            return ms(latencies[name]["percentiles"].get("50")) if name in latencies else "-"

        note = "saturated" if cell.get("saturated") else "knee" if index == knee else ""
        rows.append([cell["arrivals"]["short"], number(s["requests_per_s"]), number(s["output_tokens_per_s"]), middle("ttft"),
                     middle("tpot"), middle("e2el"), str(s["failed"]),
                     "-" if s.get("attainment") is None else f"{s['attainment']:.0%}", cell["grade"], note])
    return rows


def text(result: dict[str, Any]) -> str:
    """The report at a terminal."""
    parts = ["\n".join(f"{name:9} {value}" for name, value in facts(result))]
    cells = result["cells"]
    if len(cells) > 1:
        parts.append(table(curve_rows(result)))
    for cell in cells if len(cells) == 1 else ():
        parts += [table(latency_rows(cell)), table(load_rows(cell), right=False), SYMBOLS]
    parts.append("\n".join(f"{grade}: {sentence}" for grade, sentence in remarks(result)))
    return "\n\n".join([*parts, verdict(result)])


def markdown(result: dict[str, Any]) -> str:
    """The same as a page of markdown."""
    parts = ["# Load test", verdict(result), "\n".join(f"* **{name}**: {value}" for name, value in facts(result))]
    if len(result["cells"]) > 1:
        parts += ["## Load and latency", markdown_table(curve_rows(result))]
    for cell in result["cells"]:
        parts += [f"## {cell['arrivals']['name']}", markdown_table(latency_rows(cell)),
                  markdown_table([["", "", "formula"], *load_rows(cell)]),
                  "\n".join(f"* **{badge['grade']}**: {badge['text']}" for badge in cell["badges"])]
    return "\n\n".join([*parts, SYMBOLS + ".", "## Again", f"    {result['command']}"]) + "\n"


def facts(result: dict[str, Any]) -> list[tuple[str, str]]:
    """What was measured, with what, where from."""
    server, client, workload = result["server"], result["client"], result["workload"]
    name = f"{server['model']} at {server['base_url']}{server['endpoint']}"
    given = ", ".join(f"{key} {value}" for key, value in workload["spec"].items() if key != "dataset")
    warm = result["cells"][0]["warmups"] if result["cells"] else 0
    return [("server", name + (f", version {server['version']}" if server["version"] else "")),
            ("workload", f"{workload['spec']['dataset']} ({given}), {workload['num_prompts']} requests"
                         + (", ignore_eos" if workload["ignore_eos"] else "")),
            ("load", _loads([cell["arrivals"] for cell in result["cells"]])),
            ("warm-up", f"{warm} requests before each load; prompts are new each time (salt {result['salt']})"),
            ("client", f"{client['cpu']}, {client['cores']} cores, load average {client['load']}; Python {client['python']}, "
                       f"aiohttp {client['aiohttp']}, ridgeline {client['ridgeline']}")]


def _loads(found: Sequence[dict[str, Any]]) -> str:
    """What stands behind the number (Poisson, a cap) is the same for all loads of a sweep and said once."""
    return ", ".join([*(load["short"] for load in found[:-1]), found[-1]["name"]])


def remarks(result: dict[str, Any]) -> list[tuple[str, str]]:
    """(grade, sentence) of the run; of a sweep, what makes loads invalid, and how many have cautions."""
    cells = result["cells"]
    if len(cells) == 1:
        return [(badge["grade"], badge["text"]) for badge in cells[0]["badges"]]
    found = [("invalid", f"{cell['arrivals']['short']}: {badge['text']}") for cell in cells for badge in cell["badges"]
             if badge["grade"] == "invalid"]
    cautious = sum(any(badge["grade"] == "caution" for badge in cell["badges"]) for cell in cells)
    if cautious:
        found.append(("caution", f"{cautious} of {len(cells)} loads have cautions, which stand with each load in --html, "
                                 "--markdown and --json"))
    return found or [("valid", "nothing speaks against any load")]


def save(result: dict[str, Any], path: str) -> None:
    """.json: one object; .jsonl: the run, each cell and each request a line of its own. raises ConfigError."""
    if path.endswith(".jsonl"):
        lines = [{"type": "run", **{k: v for k, v in result.items() if k != "cells"}}]
        for index, cell in enumerate(result["cells"]):
            lines.append({"type": "cell", "cell": index, **{k: v for k, v in cell.items() if k != "requests"}})
            lines += [{"type": "request", "cell": index, **request} for request in cell["requests"]]
        write(path, "".join(json.dumps(line) + "\n" for line in lines))
    elif path.endswith(".json"):
        write(path, json.dumps(result) + "\n")
    else:
        raise ConfigError(f"--save-result is {path!r}; the name must end in .json or .jsonl")


def load(path: str) -> dict[str, Any]:
    """What `save` wrote. raises ConfigError."""
    try:
        content = Path(path).expanduser().read_text(encoding="utf-8")
        result = _of_lines(content) if path.endswith(".jsonl") else json.loads(content)
        if result["kind"] != KIND or result["version"] != VERSION:
            raise ConfigError(f"{path!r} is a result of {result['kind']}, version {result['version']}; "
                              f"{KIND}, version {VERSION} can be read")
    except OSError as error:
        raise ConfigError(f"result {path!r} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigError(f"{path!r} is no result that `bench serve --save-result` wrote: {type(error).__name__}: "
                          f"{error}") from error
    found: dict[str, Any] = result
    return found


def _of_lines(content: str) -> dict[str, Any]:
    first, *rest = [json.loads(line) for line in content.splitlines()]
    result: dict[str, Any] = {**first, "cells": []}
    for line in rest:
        if line["type"] == "cell":
            result["cells"].append({**line, "requests": []})
        else:
            result["cells"][line["cell"]]["requests"].append(line)
    return result


def without_requests(result: dict[str, Any]) -> dict[str, Any]:
    """The result without what each request did."""
    return {**result, "cells": [{k: v for k, v in cell.items() if k not in ("requests", "wakeups_s")}
                                for cell in result["cells"]]}
