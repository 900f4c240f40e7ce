"""Checks the syntax of a chat template before a client uses it, with the rules of gateways.

Called by `inspection.py` and by servers for a template that the user wrote into the swarm. Gateways take
`GenerationExtension` from here. Jinja is imported with this module: import the module late where only torch brings
Jinja along. Knows no messages.
"""

from __future__ import annotations

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser

from modelswarm.errors import ModelSourceError


class GenerationExtension(jinja2.ext.Extension):
    """Renders `{% generation %}` as its body; the tag marks the assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def check_template(text: str) -> None:
    """Raise ModelSourceError with the line if the template does not compile."""
    # Not optimised: optimising would compute constants, such as a letter times a billion.
    environment = jinja2.Environment(
        extensions=[GenerationExtension, jinja2.ext.loopcontrols], optimized=False
    )
    try:
        environment.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise ModelSourceError(
            "chat_template",
            f"the chat template does not compile: line {error.lineno}: {error.message}",
        ) from error
    except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError) as error:
        # SyntaxError comes from the Python code that Jinja generates, as for a `break` outside of loops.
        raise ModelSourceError(
            "chat_template", f"the chat template does not compile: {error}"
        ) from error
