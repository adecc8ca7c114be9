"""Figures of measurements and plans: one file per figure, and `style`. Needs matplotlib (extra `plot`)."""
