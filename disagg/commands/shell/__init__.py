"""Code that all commands share: groups of subcommands, error messages and texts."""
