"""A page about one model: `findings` are measured by `collect` and shown by `page`."""
