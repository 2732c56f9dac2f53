"""Where the time goes: the work of a pass, what the machine can do, what was predicted and what was measured."""
