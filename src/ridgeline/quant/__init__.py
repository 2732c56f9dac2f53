"""Quantising float checkpoints: how values become codes (grid), with the help of a text (calibrate, compensate), and the folder
that is written (folder)."""
