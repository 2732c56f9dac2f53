"""A server whose model says what a test wants, and a chat template that shows everything a template can be given."""
from __future__ import annotations

from server_kit import Running
from tiny_checkpoint import Script

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "\u6d77 }\\"{"}}\n</tool_call>'

TALKING_TEMPLATE = """\
{%- if tools %}{{ tools | map(attribute='function') | map(attribute='name') | join(',') }}{% endif %}
{%- for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}[{{ call.id }}:{{ call.function.name }}:{{ call.function.arguments.city }}]{% endfor %}
{%- if m.tool_call_id %}[{{ m.tool_call_id }}:{{ m.name }}]{% endif %}
{%- endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""


def says(server: Running, text: str) -> None:
    engine, tokenizer = server.llm.engine, server.llm.tokenizer
    assert tokenizer is not None
    tokens = [*tokenizer.encode(text, add_special_tokens=False), engine.eos_token_ids[0]]
    engine.strategies[engine.default_strategy] = Script(tokens, (1, 3, 2))
