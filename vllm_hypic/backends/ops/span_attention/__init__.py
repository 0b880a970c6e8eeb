"""Span attention: query rows over paged public K and V, rotated at logical positions while read."""
