"""The cache of one layer, and its parts: codecs, layouts, eviction, growth. Independent of any model."""
