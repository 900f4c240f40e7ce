"""`helm test`: waits for a model, asks it for a completion, fails if the answer is empty."""

import json
import os
import sys
import time
import urllib.error
import urllib.request

GATEWAY, MODEL = os.environ["GATEWAY"], os.environ["MODEL"]
DEADLINE = time.monotonic() + float(os.environ["TIMEOUT"])


def call(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(GATEWAY + path, data, headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def ready_model():
    """Return (name, _) of a ready model, or (None, the reason) while there is none."""
    try:
        cards = call("/v1/models")["data"]
    except (OSError, ValueError) as error:
        return None, f"{GATEWAY} does not answer: {error}"
    names = {card["id"]: card.get("ready", True) for card in cards}
    if not names:
        return None, "there is no swarm: apply one first"
    if MODEL and MODEL not in names:
        return None, f"there is no model {MODEL!r}, only {', '.join(names)}"
    found = next((n for n in names if names[n] and n == (MODEL or n)), None)
    return found, f"not ready yet: {MODEL or ', '.join(names)}"


def main():
    model, why = ready_model()
    while model is None and time.monotonic() < DEADLINE:
        print(why, flush=True)
        time.sleep(2)
        model, why = ready_model()
    if model is None:
        return f"no model is ready within {os.environ['TIMEOUT']} s: {why}"
    try:
        answer = call(
            "/v1/completions", {"model": model, "prompt": "one two three", "max_tokens": 8}
        )
    except urllib.error.HTTPError as error:
        return f"{model} was asked and failed: {error} {error.read().decode(errors='replace')}"
    text = answer["choices"][0]["text"]
    if not text.strip():
        return f"{model} answered with nothing: {answer}"
    print(f"{model}: one two three{text}", flush=True)
    return None


sys.exit(main())
