"""All options of an engine, one schema; a file for each section."""
