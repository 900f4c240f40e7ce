"""The grammar of structural tags: free text, in which a trigger announces a tag's begin, JSON and its end."""

from __future__ import annotations

import json

from modelswarm_gateway.generation.grammar.lark import ANY_TEXT, LarkRules, holding


def write_structural_tags(rules: LarkRules, text: str, whitespace: str | None) -> str:
    """Return the whole grammar. `text`: a JSON list of [trigger, begin, schema, end]."""
    tags = json.loads(text)
    # A token of the model that begins a trigger is the trigger, and text does not spell it.
    tokens = {rules.token_at_start(trigger) for trigger, _, _, _ in tags} - {""}
    rules.add_rule(
        "TEXT", " & ".join([ANY_TEXT, *(f"~{holding(each)}" for each in sorted(tokens))])
    )
    names = []
    for place, (trigger, begin, schema, end) in enumerate(tags):
        head = rules.token_at_start(trigger) or trigger
        body = f"{rules.words(begin[len(head) :])} {rules.json(json.loads(schema), whitespace)}"
        called = rules.up_to(head, f"trigger_{place}", starts="TEXT")
        names.append(rules.add_rule(f"tag_{place}", f"{called} {body} {rules.words(end)}"))
    rules.add_rule("start", f"({' | '.join(names)})* TEXT")
    return rules.text
