"""What processes of SGLang's `--tokenizer-worker-num` import: its application, after this package is registered."""

from sglang.srt.plugins import load_plugins

load_plugins()

from sglang.srt.entrypoints.http_server import app  # noqa: E402  (it must come after)

__all__ = ["app"]
