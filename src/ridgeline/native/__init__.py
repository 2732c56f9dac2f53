"""The native CPU backend: layers of a loaded model replaced by calls into C++ kernels."""
from __future__ import annotations
