"""Prefix caching: processed prompts in memory and on disk, shared by requests, processes and machines."""
