"""Tokenizers: load any of the usual files, train one's own, stream ids back to text.

Every kind of file becomes one `Tokenizer` around the `tokenizers` library, and the saved form
is always `tokenizer.json` + `tokenizer_config.json`, the layout that
transformers reads.

Text is plain text unless the caller says otherwise: a document that happens to hold
`<|endoftext|>` becomes the ordinary tokens of those characters, never the control token.
"""

from firstlight.tokenizer.formats import (
    END_OF_TEXT,
    GPT2_PATTERN,
    LLAMA3_PATTERN,
    QWEN2_PATTERN,
    SPLIT_PATTERNS,
)
from firstlight.tokenizer.tokenizer import TextStream, Tokenizer
from firstlight.tokenizer.training import train_tokenizer

__all__ = [
    "END_OF_TEXT",
    "GPT2_PATTERN",
    "LLAMA3_PATTERN",
    "QWEN2_PATTERN",
    "SPLIT_PATTERNS",
    "TextStream",
    "Tokenizer",
    "train_tokenizer",
]
