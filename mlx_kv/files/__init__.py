"""Files: prompt caches of mlx-kv and of mlx-lm, calibrations, measurements, and fingerprints of models."""
