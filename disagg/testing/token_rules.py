"""The library's ownership of tokens, by the reference's names of context parallelism."""

from __future__ import annotations

from disagg.state import declare
from disagg.testing.reference import Context


def token_rule(context: Context, page_size: int) -> declare.Rule:
    match context:
        case Context.WHOLE:
            return declare.all_tokens
        case Context.PAGE_BLOCKS:
            return declare.page_blocks(page_size)
        case Context.TOKENS_IN_TURN:
            return declare.tokens_in_turn
        case Context.PAGES_IN_TURN:
            return declare.pages_in_turn(page_size)
