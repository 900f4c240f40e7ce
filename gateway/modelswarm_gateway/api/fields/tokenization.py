"""Fields of `POST /tokenize` and `POST /detokenize`. Data only."""

from __future__ import annotations

from modelswarm_gateway.api.fields.extensions import TEXT_ONLY
from modelswarm_gateway.api.fields.states import OBEYED, FieldTable, refused

TOKENIZE = FieldTable(
    "POST /tokenize",
    {
        "vLLM": {
            "model": OBEYED,
            "prompt": OBEYED,
            "messages": OBEYED,
            "chat_template_kwargs": OBEYED,
            "add_generation_prompt": OBEYED,
            "documents": OBEYED,
            "add_special_tokens": OBEYED,
            "return_token_strs": OBEYED,
            "continue_final_message": OBEYED,
            "tools": OBEYED,
            "chat_template": refused("templates of clients are not run; the model's own is used"),
            "media_io_kwargs": refused(TEXT_ONLY, {}),
            "mm_processor_kwargs": refused(TEXT_ONLY, {}),
        }
    },
)
DETOKENIZE = FieldTable("POST /detokenize", {"vLLM": {"model": OBEYED, "tokens": OBEYED}})
