"""Sends a bundle to a repository of a hub, in one commit."""

from pathlib import Path

from spec_runtime.bundle import manifest as bundles
from spec_runtime.bundle.manifest import MANIFEST, Bundle
from spec_runtime.errors import UserError
from spec_runtime.hub.client import Repository, in_one_line, open_client

CARD = "README.md"  # a repository's page on the hub; not a part of the bundle


def push(folder: str | Path, repository: str, private: bool = False) -> str:
    """Sends the bundle in `folder` to the repository "org/name"; returns the commit's address.

    Makes the repository if there is none, a private one if `private` says so. Sends the manifest
    and what it names, after checking every hash, and a card if the repository has none. All files
    appear in one commit; those of an older bundle that the new one lacks stay, and `pull` takes no
    notice of them.

    Raises BundleError if the folder holds no whole bundle, and UserError if the hub cannot be
    reached or refuses, or if `private` is asked of a repository that everybody can read.
    """
    from huggingface_hub import CommitOperationAdd

    target = Repository.parse(repository)
    if target.revision is not None:
        raise UserError(f"got {target}, expected ORG/NAME without a revision")
    bundle = bundles.read(folder)
    client = open_client()
    with in_one_line(client, target, "write"):
        client.create_repo(target.name, private=private or None, exist_ok=True)
        info = client.model_info(target.name)
        if private and not info.private:
            raise UserError(
                f"{target}: got --private, and everybody can read it; make it private on its "
                "page, or choose another name"
            )
        names = (MANIFEST, *bundle.manifest.files)
        files = [CommitOperationAdd(name, str(bundle.file(name))) for name in names]
        if CARD not in {each.rfilename for each in info.siblings or ()}:
            files.append(CommitOperationAdd(CARD, card(bundle, target).encode()))
        message = f"Bundle {bundle.manifest.name}"
        return client.create_commit(target.name, files, commit_message=message).commit_url


def card(bundle: Bundle, repository: Repository) -> str:
    """Returns the page that a repository shows: what the bundle is and how it is run."""
    manifest = bundle.manifest
    target = manifest.target
    family, precision = _plain(target.family), _plain(target.precision)
    drafters = ", ".join(f"`{_plain(each.name)}`" for each in manifest.drafters) or "none trained"
    folder = repository.name.partition("/")[2]
    return f"""---
library_name: specsplit
tags: [speculative-decoding, onnx]
---

# {_plain(manifest.name)}

A bundle of specsplit: a target, its drafters and its tokenizer as ONNX graphs, which run without
PyTorch.

- target: `{family}`, `{precision}`, {target.max_length} tokens of context
- drafters: {drafters}

```
spec-runtime pull {repository.name}
spec-runtime generate "Why is the sky blue?" --bundle bundles/{folder}
```

The licence is that of the target's weights.
"""


def _plain(text: str) -> str:
    """Returns a name of a manifest without what Markdown or HTML would take for markup."""
    return "".join(letter for letter in text if letter not in "`<>[]*_#|\\").strip() or "unnamed"
