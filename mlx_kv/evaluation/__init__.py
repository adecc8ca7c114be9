"""What a policy costs: recall, copying, perplexity and attention, measured; which tokens it kept."""
