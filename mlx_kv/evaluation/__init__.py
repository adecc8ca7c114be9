"""Measures what a policy costs in recall, copying, perplexity and attention, and shows which tokens it keeps."""
