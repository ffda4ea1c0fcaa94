"""Writes OCI image layouts for tests: layers from lists of entries, as a folder or as a tar archive of one."""

import gzip
import hashlib
import io
import json
import subprocess
import tarfile


def entry(name, content=None, mode=0o644, kind=None, target="", uid=0):
    """(header, bytes) of one entry: a file with content, else a folder, or `kind` of tarfile with a target."""
    info = tarfile.TarInfo(name)
    info.uid = info.gid = uid
    info.mode = mode
    info.type = kind or (tarfile.DIRTYPE if content is None else tarfile.REGTYPE)
    info.linkname = target
    info.size = len(content) if content is not None else 0
    return info, content


def layer(*entries):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for info, content in entries:
            archive.addfile(info, io.BytesIO(content) if content is not None else None)
    return out.getvalue()


def busybox_layer(binary="/bin/busybox"):
    applets = subprocess.run([binary, "--list"], capture_output=True, text=True, check=True).stdout.split()
    with open(binary, "rb") as file:
        program = file.read()
    folders = [entry(name, mode=0o755) for name in ("bin", "etc", "usr", "usr/bin")]
    links = [entry(f"bin/{name}", kind=tarfile.SYMTYPE, target="busybox") for name in applets if name != "busybox"]
    return layer(*folders, entry("bin/busybox", program, mode=0o755), *links)


def digest(content):
    return "sha256:" + hashlib.sha256(content).hexdigest()


def blobs_of(layers, config=None, zipped=True, lie=None):
    """The files of a layout, by name. `lie`: changes the files before they are written."""
    files = {"oci-layout": b'{"imageLayoutVersion": "1.0.0"}'}

    def put(content, kind):
        files["blobs/sha256/" + digest(content).split(":")[1]] = content
        return {"mediaType": kind, "digest": digest(content), "size": len(content)}

    packed = [gzip.compress(content, mtime=0) if zipped else content for content in layers]
    kind = "application/vnd.oci.image.layer.v1.tar" + ("+gzip" if zipped else "")
    described = [put(content, kind) for content in packed]
    settings = {"architecture": "amd64", "os": "linux", "config": config or {},
                "rootfs": {"type": "layers", "diff_ids": [digest(content) for content in layers]}}  # fmt: skip
    manifest = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json", "layers": described,
                "config": put(json.dumps(settings).encode(), "application/vnd.oci.image.config.v1+json")}  # fmt: skip
    index = {"schemaVersion": 2, "manifests": [put(json.dumps(manifest).encode(), manifest["mediaType"])]}
    files["index.json"] = json.dumps(index).encode()
    if lie:
        lie(files)
    return files


def write_folder(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def write_archive(path, files):
    path.write_bytes(layer(*(entry(name, content) for name, content in files.items())))
    return path
