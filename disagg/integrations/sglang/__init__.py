"""SGLang's transfer backend `disagg`: `--disaggregation-transfer-backend disagg`.

`plugin` registers it, `manager`, `sender` and `receiver` are what SGLang's scheduler calls. They import SGLang. `facts`,
`layout`, `rows` and `payload` do not: they turn what SGLang says about its memory into components, rows and messages.
"""

TESTED = ("0.5.23",)
"""The versions of SGLang that the tests of this package ran with. Others are refused, unless `SGLANG_DISAGG_ANY_VERSION=1`."""
