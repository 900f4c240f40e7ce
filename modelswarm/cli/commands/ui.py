"""Options of `modelswarm ui`. The page and its server are in `client.browser`."""

from __future__ import annotations

import click

from modelswarm.cli.options.target import admin_target, admin_target_options, http_target


@click.command()
@admin_target_options
@click.option(
    "--listen",
    default="127.0.0.1:0",
    show_default=True,
    metavar="HOST:PORT",
    help="Address of the page; only of this machine. Port 0: any free one.",
)
@click.option("--open", "with_browser", is_flag=True, help="Open the page in the default browser.")
@click.option("--json", "as_json", is_flag=True, help="Print the address as a line of JSON.")
def ui(
    name: str | None,
    url: str | None,
    admin: str | None,
    listen: str,
    with_browser: bool,
    as_json: bool,
) -> None:
    """Serve a page for a browser, until Ctrl-C: servers, live sessions and a chat.

    The address that is printed has a token. Anyone who knows it may use the page. Servers can be killed there only if
    `modelswarm up` runs them on this machine.
    """
    from modelswarm.cli.terminal.signals import run_until_signal
    from modelswarm.client.browser.server import PageServer
    from modelswarm.client.browser.source import Source
    from modelswarm.process.command_line import split_target

    host, port = split_target("--listen", listen)
    chat = http_target(name, url).base if admin is None or url is not None else None
    shown = admin_target(name, url, admin)
    server = PageServer(host, port, Source(shown.address, chat, shown.run))
    with run_until_signal(server.stop, lambda: None):
        if as_json:
            from modelswarm.cli.json_output.printing import print_json

            print_json({"url": server.url})
        else:
            click.echo(f"the page is at {server.url} until Ctrl-C")
        if with_browser:
            import webbrowser

            webbrowser.open(server.url)
        server.serve_forever()
