"""`odevit-serve demo`: the page that shows what an ODE-ViT does with a picture."""

from __future__ import annotations

import typer

from . import app, require, say


@app.command()
def demo(
    model: list[str] = typer.Option(
        [], "--model", help="Bundle to offer beside the bundled ones; repeatable, the first one is shown first."
    ),
    host: str = typer.Option("127.0.0.1", "--host", help="Address to listen on; 0.0.0.0 for all."),
    port: int = typer.Option(7860, "--port", min=1, max=65535),
    share: bool = typer.Option(False, "--share", help="Ask Gradio for a public address."),
    device: str = typer.Option("cpu", "--device", help="cpu, cuda, tensorrt or auto."),
    threads: int = typer.Option(None, "--threads", help="Threads of onnxruntime; default: one per core."),
) -> None:
    """Show the model on a web page: answers, depth, attention and the trajectory of a picture."""
    require("demo")
    from ..demo.app import launch
    from ..demo.page import Models

    models = Models(model, device, threads)
    models.engine(models.default)  # fails here, in one sentence, rather than on the page
    say(f"showing {', '.join(models.names)} on http://{host}:{port}")
    try:
        launch(models, host, port, share)
    finally:
        models.close()
