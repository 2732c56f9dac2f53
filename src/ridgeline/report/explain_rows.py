"""What `ridgeline explain` found, as the rows of tables and facts that its text, markdown and HTML share."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ridgeline.report.text import Rows, ms, number, share, si

STAGE_HEAD = ["stage", "batch", "context", "rows", "FLOPs", "bytes", "FLOP/B", "ridge", "bound by", "roof ms", "predicted ms",
              "measured ms", "of roof"]
COMPONENT_HEAD = ["#", "component", "layers", "FLOPs", "bytes", "FLOP/B", "ridge", "bound by", "roof ms", "predicted ms",
                  "measured ms", "of roof", "of time"]


def facts(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The machine, the model, the question, the memory."""
    model, settings, memory = result["model"], result["settings"], result["memory"]
    need = (f"weights {si(memory['weights'], 'B')} + cache {si(memory['cache'], 'B')} = {si(memory['total'], 'B')} of "
            f"{si(memory['available'], 'B')}")
    if not memory["fits"]:
        need += f"; {si(memory['missing'], 'B')} are missing"
    return [("machine", _machine(result["hardware"])),
            ("model", f"{model['name']} ({model['format']}, {model['architecture']}): {si(model['parameters'])} parameters, "
                      f"weights {', '.join(model['weight_types'])}; KV cache {model['kv_cache_dtype']}, "
                      f"{si(memory['kv_bytes_per_token'], 'B')} a token; {model['backend']}"),
            ("asked", f"batch {settings['batch']}, context {settings['context']:,}, answers of {settings['output']:,} tokens, "
                      f"passes of at most {settings['chunk']:,} rows"),
            ("memory", need)]


def _machine(hardware: Mapping[str, Any]) -> str:
    peaks = ", ".join(f"{name} {si(peak, 'FLOP/s')}" for name, peak in sorted(hardware["peaks"].items(), key=lambda p: -p[1]))
    how = "measured" if hardware["curves"] else "by its data sheet"
    threads = f", {hardware['threads']} threads" if hardware["device"] == "cpu" else ""
    return f"{hardware['name']}{threads}: reads {si(hardware['bandwidth'], 'B/s')}, computes {peaks}; {how}"


def stage_rows(result: Mapping[str, Any]) -> Rows:
    """Two rows a stage: as executed, and in the chapter's counting (16 bits, every intermediate written)."""
    rows = [STAGE_HEAD]
    for one in result["stages"]:
        rows.append([one["stage"], str(one["batch"]), f"{one['context']:,}", f"{one['tokens']:,}", *_figures(one)])
        chapter = one["chapter"]
        rows.append(["  chapter", "", "", "", si(chapter["flops"]), si(chapter["bytes"]), _intensity(chapter["intensity"]),
                     *[""] * 6])
    return rows


def component_rows(stage: Mapping[str, Any]) -> Rows:
    rows = [COMPONENT_HEAD]
    for index, one in enumerate(stage["components"], 1):
        rows.append([str(index), one["component"], str(one["layers"]), *_figures(one), share(one["share_of_time"])])
    return rows


def _figures(one: Mapping[str, Any]) -> list[str]:
    """From FLOPs to the share of the roof."""
    return [si(one["flops"]), si(one["bytes"]), _intensity(one["intensity"]), _intensity(one["ridge"]), one["bound"],
            ms(one["roof_s"]), ms(one["predicted_s"]), ms(one["measured_s"]), share(one["share_of_roof"])]


def waterfall_rows(result: Mapping[str, Any]) -> Rows:
    """A column each for a request and for a step of either stage: milliseconds and the share of the wall time."""
    falls = {"request": result["waterfall"], **{f"{k} step": v for k, v in result["step_waterfalls"].items()}}
    falls = {name: fall for name, fall in falls.items() if fall is not None}
    if not falls:
        return []
    names = list(dict.fromkeys(name for fall in falls.values() for name in fall["parts"]))
    rows = [["ms", *(f"{name}, share" for name in falls)]]
    for name in names:
        rows.append([name, *(_part(fall["parts"].get(name), fall["wall_s"]) for fall in falls.values())])
    rows.append(["no name", *(_part(fall["residual_share"] * fall["wall_s"], fall["wall_s"]) for fall in falls.values())])
    return [*rows, ["wall time", *(ms(fall["wall_s"]) for fall in falls.values())]]


def _part(seconds: float | None, whole: float) -> str:
    return "" if seconds is None else f"{ms(seconds)} {share(seconds / whole if whole else 0.0):>6}"


def sweep_rows(result: Mapping[str, Any], key: str) -> Rows:
    """key: batch or context."""
    rows = [[key, "TTFT ms", "ITL ms", "measured", "tokens/s", "measured", "memory", "bound by", ""]]
    for row in result["sweeps"][key]:
        rows.append([f"{row[key]:,}", ms(row["ttft_s"]), ms(row["itl_s"]), ms(row["measured_itl_s"]),
                     number(row["tokens_per_s"]), number(row["measured_tokens_per_s"]), si(row["memory_bytes"], "B"),
                     row["bound"], "" if row["fits"] else "does not fit"])
    return rows


def limit_rows(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Where things turn."""
    found, s = result["limits"], result["settings"]
    at = f"at context {s['context']:,}"

    def told(value: int | None, none: str) -> str:
        return none if value is None else f"{value:,}"

    return [
        ("batching helps up to", told(found["batch_stops"], "a batch of more than 1,024")
         + f" sequences {at}: from there on twice as many give less than a twentieth more tokens a second (predicted)"),
        ("compute roof", f"from batch {told(found['batch_compute'], 'infinity')} on, products compute longer than they read "
                         "weights"),
        ("KV roof", f"from batch {told(found['batch_kv'], 'infinity')} on, a step reads more keys, values and states than "
                    f"weights {at}"),
        ("memory", f"{told(found['batch_memory'], 'any number of')} sequences fit {at}"),
        ("KV overtakes the weights", "at no context" if found["kv_overtakes_context"] is None else
         f"from context {found['kv_overtakes_context']:,} on at batch {s['batch']}")]


def advice_rows(result: Mapping[str, Any]) -> Rows:
    rows = [["lever", "gains", "predicted", "realised", "95 % interval", "verdict", "costs", "because"]]
    for one in result["advice"]:
        interval = one["interval"]
        within = "-" if interval is None else f"{gain(interval[0])} to {gain(interval[1])}"
        rows.append([one["lever"], one["metric"], gain(one["predicted_gain"]), gain(one["verified_gain"]), within, pays(one),
                     one["cost"], one["reason"]])
    return rows


def pays(one: Mapping[str, Any]) -> str:
    what = {"setting": "", "model": "another model", "hardware": "another machine"}[one["kind"]]
    return (what or "pays") if one["pays"] else "does not pay"


def gain(value: float | None) -> str:
    return "-" if value is None else f"x{value:.2f}" if value < 100 else f"x{value:.0f}"


def reproduce(result: Mapping[str, Any]) -> str:
    return str(result.get("command", ""))


def _intensity(value: float | None) -> str:
    return "-" if value is None else number(value)


def badge_pairs(result: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
    return [(grade, text) for grade, text in result["badges"]]
