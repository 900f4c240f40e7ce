"""Fields of the objects of tools: definitions, the choice, and calls in messages. Data only."""

from __future__ import annotations

from modelswarm_gateway.api.fields.states import OBEYED, FieldTable, NoEffect, refused

FUNCTIONS_ONLY = "tools are functions"

TOOL = FieldTable(
    "a tool",
    {
        "OpenAI": {
            "type": OBEYED,
            "function": OBEYED,
            "custom": refused(FUNCTIONS_ONLY),
        }
    },
)
FUNCTION = FieldTable(
    "a tool's function",
    {
        "OpenAI": {
            "name": OBEYED,
            "description": OBEYED,
            "parameters": OBEYED,
            "strict": OBEYED,
        }
    },
)
TOOL_CHOICE = FieldTable(
    "tool_choice",
    {
        "OpenAI": {
            "type": OBEYED,
            "function": OBEYED,
            "allowed_tools": refused("it needs the type allowed_tools"),
            "custom": refused(FUNCTIONS_ONLY),
        }
    },
)
ALLOWED_TOOLS_CHOICE = FieldTable(
    "tool_choice with the type allowed_tools",
    {
        "OpenAI": {
            "type": OBEYED,
            "allowed_tools": OBEYED,
            "function": refused("it needs the type function"),
            "custom": refused(FUNCTIONS_ONLY),
        }
    },
)
ALLOWED_TOOLS = FieldTable(
    "tool_choice.allowed_tools", {"OpenAI": {"mode": OBEYED, "tools": OBEYED}}
)
ALLOWED_TOOL = FieldTable(
    "an allowed tool",
    {"OpenAI": {"type": OBEYED, "function": OBEYED, "custom": refused(FUNCTIONS_ONLY)}},
)
CHOSEN_FUNCTION = FieldTable("tool_choice.function", {"OpenAI": {"name": OBEYED}})
TOOL_CALL = FieldTable(
    "a tool call",
    {
        "OpenAI": {
            "id": OBEYED,
            "type": OBEYED,
            "function": OBEYED,
            "custom": refused(FUNCTIONS_ONLY),
        },
        # Clients send the entries of a stream back as they came.
        "stream": {
            "index": refused("an entry of a stream; the order of the list counts", *range(128))
        },
    },
)
CALLED_FUNCTION = FieldTable(
    "a called function",
    {
        "OpenAI": {
            "name": OBEYED,
            "arguments": OBEYED,
            "parsed_arguments": NoEffect("OpenAI's clients add it: it is in arguments"),
        }
    },
)

TOOL_TABLES = (
    TOOL,
    FUNCTION,
    TOOL_CHOICE,
    CHOSEN_FUNCTION,
    ALLOWED_TOOLS_CHOICE,
    ALLOWED_TOOLS,
    ALLOWED_TOOL,
    TOOL_CALL,
    CALLED_FUNCTION,
)
WORDS = {
    "type": '"function"; of a choice also "allowed_tools"',
    "function": "an object",
    "name": "1 to 64 letters, digits, '_' and '-'",
    "description": "a string",
    "parameters": "the JSON schema of an object",
    "strict": "true or false",
    "allowed_tools": "an object",
    "mode": '"auto" or "required"',
    "tools": "a list of functions by their names, not empty",
    "id": "a string, not empty",
    "arguments": "a string of JSON",
}
"""Field -> what it may be; of all tables here."""
