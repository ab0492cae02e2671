"""A production rank: `disagg prefill` and `disagg decode`."""
