"""Whether a chat template is one, before anybody chats: its syntax, as gateways will read it.

Called by `inspect` and by servers for a template that the user wrote into the swarm; gateways take `Generation` from
here. Jinja is imported with this module: import it late where only torch brings Jinja along.
"""

from __future__ import annotations

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser

from modelswarm.errors import ModelSourceError


class Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant said, for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def check_template(text: str) -> None:
    """ModelSourceError with the line, when it does not compile."""
    # Not optimised: that would already compute what is constant, such as a letter times a billion.
    environment = jinja2.Environment(
        extensions=[Generation, jinja2.ext.loopcontrols], optimized=False
    )
    try:
        environment.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise ModelSourceError(
            "chat_template",
            f"the chat template does not compile: line {error.lineno}: {error.message}",
        ) from error
    except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError) as error:
        # SyntaxError: of the Python code that Jinja makes, as for a `break` outside of loops.
        raise ModelSourceError(
            "chat_template", f"the chat template does not compile: {error}"
        ) from error
