"""Programs that use the plugin; ``python -m examples.demo`` runs the demonstration."""
