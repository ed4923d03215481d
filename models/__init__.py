"""The reference GPT and its named configurations, imported as `tpfuse.models`."""
