"""Models from the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import DownloadError

PATTERNS = ("*.safetensors", "*.json", "*.jinja")
ELSEWHERE = ("*/*",)
"""Folders of a repository hold other formats of the same weights."""


def fetch_from_hub(name: str, *, download: bool) -> Path:
    """The local copy of ``owner/name`` (a directory, or its only GGUF file) or of ``owner/name/file.gguf``.

    Without ``download``, and when the hub cannot be reached, it is what an earlier call brought. Raises DownloadError.
    """
    try:
        import huggingface_hub
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError as error:
        raise DownloadError(f"{name} is on the hub: install huggingface_hub, or give the path of a download") from error
    owner, repository, *rest = name.split("/")
    repo_id, file_name = f"{owner}/{repository}", "/".join(rest)
    try:
        if not file_name and download:
            try:
                file_name = _only_gguf(name, huggingface_hub.HfApi().list_repo_files(repo_id))
            except (HfHubHTTPError, DownloadError):  # the hub has answered
                raise
            except Exception:  # no connection; its type is the HTTP client's, which changes between versions
                download = False
        if file_name:
            return Path(huggingface_hub.hf_hub_download(repo_id, file_name, local_files_only=not download))
        directory = huggingface_hub.snapshot_download(
            repo_id, allow_patterns=list(PATTERNS), ignore_patterns=list(ELSEWHERE), local_files_only=not download
        )
    except DownloadError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DownloadError(f"{name} could not be fetched from the hub: {reason}") from error
    return _model_in(Path(directory))


def _only_gguf(name: str, files: list[str]) -> str:
    """Empty when the repository has safetensors, else its GGUF file; DownloadError when there are several or none."""
    if any(file.endswith(".safetensors") and "/" not in file for file in files):
        return ""
    ggufs = [file for file in files if file.endswith(".gguf")]
    if not ggufs:
        raise DownloadError(f"{name} holds neither safetensors nor GGUF files")
    if len(ggufs) > 1:
        choices = ", ".join(f"{name}/{file}" for file in ggufs)
        raise DownloadError(f"{name} holds several GGUF files; choose one: {choices}")
    return ggufs[0]


def _model_in(directory: Path) -> Path:
    """The directory, or the GGUF file in it when that is all there is."""
    ggufs = sorted(directory.glob("*.gguf"))
    return ggufs[0] if len(ggufs) == 1 and not (directory / "config.json").exists() else directory
