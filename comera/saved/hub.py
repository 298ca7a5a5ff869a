"""Upload a saved model to the hub of Hugging Face."""

import tempfile
from pathlib import Path
from typing import Any

from torch import nn

from comera.extras import needed_by
from comera.nn.config import TTConfig
from comera.saved.model_folder import save_model


def push_to_hub(
    model: nn.Module,
    repo_id: str,
    *,
    config: TTConfig | None = None,
    private: bool | None = None,
    token: str | None = None,
    message: str = "Upload model",
    **options: Any,
) -> str:
    """Save a model and upload the folder to the hub of Hugging Face.

    ``comera.load_model(huggingface_hub.snapshot_download(repo_id), factory)`` makes it again.

    Args:
        model: As :func:`~comera.save_model` takes it.
        repo_id: ``"user/name"``; the repository is made if it is not there.
        config: How the model was compressed, kept in ``comera.json`` for people.
        private: Whether a new repository is private; by default what the account says.
        token: That of the account; by default the one that ``hf auth login`` has stored.
        message: Of the commit.
        options: More of ``huggingface_hub.HfApi.upload_folder``, such as ``revision``.

    Returns:
        The address of the commit.

    Raises:
        MissingPackageError: If huggingface_hub is not installed.
        ValueError: If the model cannot be saved; nothing is uploaded then.
    """
    with needed_by("push_to_hub()"):
        from huggingface_hub import HfApi
    api = HfApi(token=token)
    with tempfile.TemporaryDirectory() as folder:
        save_model(model, Path(folder), config=config)
        made = api.create_repo(repo_id, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=made.repo_id, folder_path=folder, commit_message=message, **options
        )
    return str(commit)
