"""Grammars that an output must follow: compiled once, followed token by token. llguidance does the parsing."""
from __future__ import annotations

from ridgeline.grammar.base import Grammar, Mask, Matcher

__all__ = ["Grammar", "Mask", "Matcher"]
