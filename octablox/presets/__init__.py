"""Presets: the sizes of models by name, one YAML file each; see `octablox.config.preset`."""
