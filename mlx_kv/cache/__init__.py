"""The cache of one layer, and its parts: codecs, layouts, eviction, growth. Knows nothing about models."""
