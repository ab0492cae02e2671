"""SGLang's transfer backend `disagg` (`--disaggregation-transfer-backend disagg`).

`facts`, `layout`, `rows` and `payload` turn what SGLang says about its memory into components, rows and messages, and import
no SGLang.
"""

TESTED = ("0.5.23",)
"""The tested versions of SGLang. Others are refused, unless `SGLANG_DISAGG_ANY_VERSION=1`."""
