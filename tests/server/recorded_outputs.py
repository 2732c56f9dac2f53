"""Answers as each family of models writes them, and the message in each: (parser, text, content, [(name, arguments)])."""
from __future__ import annotations

TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather of a city", "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string"}, "days": {"type": "integer"}, "exact": {"type": "boolean"},
            "limit": {"anyOf": [{"type": "number"}, {"type": "null"}]}, "tags": {"type": "array", "items": {"type": "string"}},
            "options": {"$ref": "#/$defs/options"}},
        "required": ["city"],
        "$defs": {"options": {"type": "object", "properties": {"unit": {"enum": ["C", "F"]}}}}}}},
    {"type": "function", "function": {"name": "write_file", "parameters": {
        "type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}}}},
    {"type": "function", "function": {"name": "now"}},
]

PARIS, ROME = {"city": "Paris"}, {"city": "Rome", "days": 3}
NASTY = {"city": 'quo"te \\ { } [ ] </b> \u00e9\u4f60\U0001f600', "options": {"unit": "C", "deep": [{"a": [1, {"b": {}}]}]}}
NASTY_JSON = ('{"city": "quo\\"te \\\\ { } [ ] </b> \u00e9\u4f60\U0001f600", '
              '"options": {"unit": "C", "deep": [{"a": [1, {"b": {}}]}]}}')

_B, _E = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
_b, _e, _s = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>", "<\uff5ctool\u2581sep\uff5c>"
_V3 = f'{_b}function{_s}get_weather\n```json\n{{"city": "Paris"}}\n```{_e}'

Recorded = tuple[str, str, str | None, list[tuple[str, dict[str, object]]]]

CALLS: list[Recorded] = [
    # hermes
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>', None, [("get_weather",
     PARIS)]),
    ("hermes", 'Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
               '<tool_call>\n{"arguments": {"city": "Rome", "days": 3}, "name": "get_weather"}\n</tool_call>\n',
     "Let me look.\n", [("get_weather", PARIS), ("get_weather", ROME)]),
    ("hermes", f'<tool_call>{{"name": "get_weather", "arguments": {NASTY_JSON}}}</tool_call> and then?', " and then?",
     [("get_weather", NASTY)]),
    ("hermes", '<tool_call>{"name":"now"}</tool_call>', None, [("now", {})]),
    ("hermes", '<tool_call>{"name":"now","arguments":null}</tool_call>', None, [("now", {})]),
    ("hermes", '<tool_call>{"name":"get_weather","arguments":"{\\"city\\": \\"Paris\\"}"}</tool_call>', None,
     [("get_weather", PARIS)]),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}</tool_call>', None, [("get_weather", PARIS)]),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}', None, [("get_weather", PARIS)]),
    ("hermes", 'a < b, <tool> and <tool_call', "a < b, <tool> and <tool_call", []),
    ("hermes", '<tool_call>no JSON</tool_call>', "<tool_call>no JSON</tool_call>", []),
    ("hermes", '<tool_call>{"title": 3}</tool_call>', '<tool_call>{"title": 3}</tool_call>', []),
    ("hermes", 'x<tool_call>{"name": "get_weather", "argu', 'x<tool_call>{"name": "get_weather", "argu', []),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "Par', '<tool_call>{"name": "get_weather",'
     ' "arguments": '
               '{"city": "Par', []),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}}</tool_call><tool_call>{"name": "get_weather", "arguments":'
     ' {"city": ',
     '<tool_call>{"name": "get_weather", "arguments": {"city": ', [("now", {})]),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": [}</tool_call>',
     '<tool_call>{"name": "get_weather", "arguments": {"city": [}</tool_call>', []),
    # llama3_json
    ("llama3_json", '{"name": "get_weather", "parameters": {"city": "Paris"}}', None, [("get_weather", PARIS)]),
    ("llama3_json", '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}', None, [("get_weather", PARIS)]),
    ("llama3_json", '{"name": "get_weather", "parameters": {"city": "Paris"}}; {"type": "function", "name": "get_weather", '
                    '"arguments": {"city": "Rome", "days": 3}}', None, [("get_weather", PARIS), ("get_weather", ROME)]),
    ("llama3_json", f'\n{{"name": "get_weather", "parameters": {NASTY_JSON}}}', None, [("get_weather", NASTY)]),
    ("llama3_json", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
    ("llama3_json", '{not JSON}', '{not JSON}', []),
    ("llama3_json", '{"name": "get_weather", "param', '{"name": "get_weather", "param', []),
    ("llama3_json", 'The weather {"is": "fine"}', 'The weather {"is": "fine"}', []),
    ("llama3_json", 'Sure.<|python_tag|>{"name": "now", "parameters": {}}', "Sure.", [("now", {})]),
    ("llama3_json", '<|python_tag|>brave_search.call(query="x")', '<|python_tag|>brave_search.call(query="x")', []),
    ("llama3_json", '{"name": "now", "parameters": {}}; done', "; done", [("now", {})]),
    # mistral
    ("mistral", '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "get_weather", "arguments": '
                '{"city": "Rome", "days": 3}}]', None, [("get_weather", PARIS), ("get_weather", ROME)]),
    ("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Rome", '
                '"days": 3}', None, [("get_weather", PARIS), ("get_weather", ROME)]),
    ("mistral", f'Ok [TOOL_CALLS]get_weather{NASTY_JSON}', "Ok ", [("get_weather", NASTY)]),
    ("mistral", f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {NASTY_JSON}}}]', None, [("get_weather", NASTY)]),
    ("mistral", 'See [TOOL_CA', "See [TOOL_CA", []),
    ("mistral", '[TOOL_CALLS] [1]', "[TOOL_CALLS] [1]", []),
    ("mistral", '[TOOL_CALLS]get_weather', "[TOOL_CALLS]get_weather", []),
    ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"name"', ', {"name"', [("now", {})]),
    ("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "Par', '[TOOL_CALLS]get_weather[ARGS]{"city": "Par', []),
    # pythonic
    ("pythonic", '[get_weather(city="Paris")]', None, [("get_weather", PARIS)]),
    ("pythonic", "[get_weather(city='Paris'), get_weather(city='Rome', days=3), now()]", None,
     [("get_weather", PARIS), ("get_weather", ROME), ("now", {})]),
    ("pythonic", '<|python_start|>[get_weather("Rome", "3", exact=True, limit=None)]<|python_end|>', None,
     [("get_weather", {**ROME, "exact": True, "limit": None})]),
    ("pythonic", '[get_weather(city="quo\\"te \\\\ { } [ ] </b> \u00e9\u4f60\U0001f600", options={"unit": "C", "deep":'
     ' [{"a": [1, '
                 '{"b": {}}]}]})]', None, [("get_weather", NASTY)]),
    ("pythonic", '[get_weather(city=75001, exact=true, tags=("a", "b"))]', None,
     [("get_weather", {"city": "75001", "exact": True, "tags": ["a", "b"]})]),
    ("pythonic", '[get_weather(city="Paris", days=three)]', None, [("get_weather", {"city": "Paris", "days": "three"})]),
    ("pythonic", "[see](http://x) for more", "[see](http://x) for more", []),
    ("pythonic", "[1, 2]", "[1, 2]", []),
    ("pythonic", "Paris is [get_weather(city='x')]", "Paris is [get_weather(city='x')]", []),
    ("pythonic", "[get_weather(city='Paris', days=", "[get_weather(city='Paris', days=", []),
    ("pythonic", "[now(), get_wea", ", get_wea", [("now", {})]),
    ("pythonic", "[now()] done", " done", [("now", {})]),
    # deepseek_v3
    ("deepseek_v3", f"{_B}{_V3}{_E}", None, [("get_weather", PARIS)]),
    ("deepseek_v3", f'One moment.{_B}{_V3}\n{_b}function{_s}get_weather\n```json\n{{"city": "Rome", "days": 3}}\n```{_e}{_E}',
     "One moment.", [("get_weather", PARIS), ("get_weather", ROME)]),
    ("deepseek_v3", f'{_B}{_b}get_weather{_s}{{"city": "Paris"}}{_e}{_b}get_weather{_s}{NASTY_JSON}{_e}{_E}', None,
     [("get_weather", PARIS), ("get_weather", NASTY)]),
    ("deepseek_v3", f"{_B}{_b}function{_s}get_wea", f"{_B}{_b}function{_s}get_wea", []),
    ("deepseek_v3", f"{_B}oh", f"{_B}oh", []),
    ("deepseek_v3", f'{_B}{_b}get_weather{_s}{{"city": "P{_e}', f'{_B}{_b}get_weather{_s}{{"city": "P{_e}', []),
    ("deepseek_v3", f'{_B}{_b}get_weather{_s}{{"city": 1,{_e}{_E}', f'{_B}{_b}get_weather{_s}{{"city": 1,{_e}', []),
    ("mistral", '[TOOL_CALLS]now[ARGS]{"a": [[1], [TOOL_CALLS]now[ARGS]{}', '[TOOL_CALLS]now[ARGS]{"a": [[1], ', [("now", {})]),
    # qwen3_coder
    ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n"
     "</tool_call>", None,
     [("get_weather", PARIS)]),
    ("qwen3_coder", "I'll check.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n"
     "<parameter=days>\n3\n"
                    "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
     "I'll check.\n\n", [("get_weather", ROME), ("now", {})]),
    ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=city>\nquo\"te \\ { } [ ] </b>"
     " \u00e9\u4f60\U0001f600\n</parameter>\n"
                    '<parameter=options>\n{"unit": "C", "deep": [{"a": [1, {"b": {}}]}]}\n</parameter>\n</function>\n'
                    '</tool_call>', None,
     [("get_weather", NASTY)]),
    ("qwen3_coder", "<tool_call>\n<function=write_file>\n<parameter=path>\na.py\n</parameter>\n<parameter=text>\n\nif x"
     " < 3:\n\tprint('\\n')\n\n"
                    "</parameter>\n</function>\n</tool_call>", None,
     [("write_file", {"path": "a.py", "text": "\nif x < 3:\n\tprint('\\n')\n"})]),
    ("qwen3_coder", "<function=get_weather>\n<parameter=city>\nRome\n<parameter=exact>\nTrue\n</parameter>\n"
     "<parameter=limit>null</parameter>\n"
                    "<parameter=tags>\n['a']\n</parameter>\n<parameter=days>\nmany\n</parameter>\n</function>", None,
     [("get_weather", {"city": "Rome", "exact": True, "limit": None, "tags": ["a"], "days": "many"})]),
    ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=city>\nPar",
     "<tool_call>\n<function=get_weather>\n<parameter=city>\nPar", []),
    ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=days>\n3", "<tool_call>\n<function=get_weather>\n"
     "<parameter=days>\n3", []),
    ("qwen3_coder", "<tool_call>\n<func", "<tool_call>\n<func", []),
    ("qwen3_coder", "<tool_call>hm</tool_call>", "<tool_call>hm</tool_call>", []),
    # gpt_oss
    ("gpt_oss", '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>', None,
     [("get_weather", PARIS)]),
    ("gpt_oss", '<|channel|>commentary<|message|>Two calls.<|end|><|start|>assistant<|channel|>commentary'
     ' to=functions.get_weather '
                f'json<|message|>{NASTY_JSON}<|call|><|start|>assistant to=functions.get_weather<|channel|>commentary '
                f'<|constrain|>json'
                '<|message|>{"city": "Rome", "days": 3}', "Two calls.", [("get_weather", NASTY), ("get_weather", ROME)]),
    ("gpt_oss", '<|channel|>commentary to=functions.now<|message|><|call|>', None, [("now", {})]),
    ("gpt_oss", '<|channel|>final<|message|>Fine, 1 < 2.<|return|>', "Fine, 1 < 2.", []),
    ("gpt_oss", 'Plain text', "Plain text", []),
    ("gpt_oss", '<|channel|>commentary to=functions.get_weather<|message|>{"city": "Par',
     '<|channel|>commentary to=functions.get_weather<|message|>{"city": "Par', []),
    ("gpt_oss", '<|channel|>comm', '<|channel|>comm', []),
]

# (parser, end of the prompt, text, reasoning, content)
THOUGHTS: list[tuple[str, str, str, str | None, str | None]] = [
    ("deepseek_r1", "", "<think>\nHm, 1 < 2.\n\nYes.\n</think>\n\nIt is 3.", "Hm, 1 < 2.\n\nYes.", "It is 3."),
    ("deepseek_r1", "<think>\n", "Hm.\n</think>\nIt is </think> 3.", "Hm.", "It is </think> 3."),
    ("deepseek_r1", "", "Hm. \u4f60\u597d </thin", "Hm. \u4f60\u597d </thin", None),
    ("deepseek_r1", "<think>\n\n</think>\n\n", "<think> is a tag", None, "<think> is a tag"),
    ("qwen3", "", "<think>\nHm.\n</think>\n\nIt is 3.", "Hm.", "It is 3."),
    ("qwen3", "", "It is 3.", None, "It is 3."),
    ("qwen3", "<|im_start|>assistant\n<think>\n", "Hm.\n</think>\n\n\U0001f600", "Hm.", "\U0001f600"),
    ("qwen3", "<think>\n\n</think>\n\n", "It is 3.", None, "It is 3."),
    ("qwen3", "", "<think>\nHm\n", "Hm\n", None),
    ("qwen3", "", "\n<thinking", None, "\n<thinking"),
    ("gpt_oss", "", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>It is 3.<|return|>",
     "Hm.", "It is 3."),
    ("gpt_oss", "", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>analysis<|message|>Yes.<|end|>",
     "Hm.\nYes.", None),
    ("gpt_oss", "", '<|channel|>commentary to=functions.f<|message|>{}<|call|>', None, "{}"),
]
