"""A certificate holds as long as files and numbers are those that it names."""

import base64
import json
import shutil
from contextlib import chdir
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from tests.support.certificates import add_items, certify
from tests.support.report_examples import edit, write_run
from workflow.lib.evaluation.certificate import verify
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import read_json, write_checksums, write_json


@pytest.fixture
def root(tmp_path):
    folder = write_run(tmp_path, "demo", num_steps=3)
    adapter = folder / "consolidate" / "adapter"
    (adapter / "adapter_model.safetensors").write_bytes(b"weights")
    write_checksums(adapter)
    add_items(folder)
    return tmp_path


def verified(root, certificate, **options):
    with chdir(root):
        return verify(certificate, **{"signed_by": None} | options)


def test_certificate_is_an_in_toto_statement_without_a_path_of_this_machine(root):
    path = root / certify(root, "demo")
    said = read_json(path)
    assert said["_type"] == "https://in-toto.io/Statement/v1"
    assert {"subject", "predicateType", "predicate"} < said.keys()
    assert all(len(file["digest"]["sha256"]) == 64 for file in said["subject"])
    assert str(root) not in path.read_text()
    tuned = said["predicate"]["measured"]["tuned"]
    assert tuned["heldout"]["loss"] == pytest.approx((21.0 + 8.5 + 15.75) / 24)
    assert tuned["tasks"]["pydocs_mc"]["metrics"]["acc"]["value"] == 0.75
    paired = tuned["comparisons"]["base"]["tasks"]["pydocs_mc"]["acc"]
    assert (paired["gained"], paired["lost"]) == (2, 0)
    summary = said["predicate"]["facts"]["runs/demo/finetune/summary.json"]
    assert summary["provenance"]["commit"]


def test_certificate_holds_where_the_run_was_made(root):
    found = verified(root, certify(root, "demo"))
    assert (found.absent, found.signer) == ([], "not signed")


def test_published_files_are_found_beside_it_and_the_others_named(root, tmp_path_factory):
    certificate = certify(root, "demo")
    elsewhere = tmp_path_factory.mktemp("downloaded")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(root / "runs" / "demo" / "consolidate" / "adapter" / name, elsewhere)
    shutil.copy(root / certificate, elsewhere)
    shutil.copy(root / "runs" / "demo" / "evaluate_run" / "items.json", elsewhere)
    found = verified(elsewhere, Path("certificate.json"))
    assert [Path(name).name for name in found.absent] == [
        "served.json", "parity.json", "summary.json", "manifest.json",
    ]  # fmt: skip


def test_every_file_with_one_byte_changed_is_named(root):
    certificate = certify(root, "demo")
    names = [file["name"] for file in read_json(root / certificate)["subject"]]
    assert len(names) == 7
    for name in names:
        before = (root / name).read_bytes()
        (root / name).write_bytes(before[:-2] + bytes([before[-2] ^ 1]) + before[-1:])
        with pytest.raises(UserError, match=rf"not the files that were certified: {name}\."):
            verified(root, certificate)
        (root / name).write_bytes(before)
    verified(root, certificate)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda p: p["measured"]["tuned"]["heldout"].update(loss=1.0),
            r"tuned\.heldout\.loss = 1\.0, found 1\.88.* does not follow from the items",
        ),
        (
            lambda p: p["measured"]["tuned"]["comparisons"]["base"].update(p_value=1e-6),
            r"tuned\.comparisons\.base\.p_value = 1e-06",
        ),
        (
            lambda p: p["measured"]["base"]["tasks"]["pydocs_mc"]["metrics"].update(
                f1={"value": 1.0}
            ),
            r"base\.tasks\.pydocs_mc\.metrics\.f1\.value = 1\.0, found nothing",
        ),
        (lambda p: p["measured"].pop("base"), r"base\.heldout\.loss = nothing, found"),
        (
            lambda p: p["facts"]["runs/demo/consolidate/parity.json"].update(tolerance=9.0),
            r"parity\.json\.tolerance = 9\.0, found 0\.05 in the file itself",
        ),
        (
            lambda p: p["facts"].pop("runs/demo/check_served/served.json"),
            r"served\.json\.\w+ = nothing, found",
        ),
        (
            lambda p: p["required"]["heldout_loss/qa"].update(met=True),
            r"required\.heldout_loss/qa\.met = True, found False",
        ),
        (
            lambda p: p["overlap"]["pydocs_mc"].update(dirty=0),
            r"overlap\.pydocs_mc\.dirty = 0, found 1",
        ),
        (
            lambda p: p["facts"].update(benchmark={"score": 1.0}),
            r"benchmark\.score = 1\.0, found nothing",
        ),
    ],
)
def test_number_that_does_not_follow_is_named(root, change, message):
    certificate = certify(root, "demo")
    said = read_json(root / certificate)
    change(said["predicate"])
    write_json(root / certificate, said)
    with pytest.raises(UserError, match=message):
        verified(root, certificate)


def test_evaluation_that_its_items_do_not_give_is_not_certified(root):
    path = root / "runs" / "demo" / "evaluate_run" / "tuned.json"
    edit(path, lambda document: document["heldout"].update(loss=0.1))
    with pytest.raises(UserError, match=r"tuned\.json: heldout\.loss = 0\.1, found 1\.88"):
        certify(root, "demo")


def key_pair(folder, name, form):
    """Write a private and a public key as `ssh-keygen` does, or in PEM; return their paths."""
    key = Ed25519PrivateKey.generate()
    of_private, of_public = (
        (PrivateFormat.OpenSSH, PublicFormat.OpenSSH)
        if form == "ssh"
        else (PrivateFormat.PKCS8, PublicFormat.SubjectPublicKeyInfo)
    )
    private, public = folder / name, folder / f"{name}.pub"
    private.write_bytes(key.private_bytes(Encoding.PEM, of_private, NoEncryption()))
    encoding = Encoding.OpenSSH if form == "ssh" else Encoding.PEM
    public.write_bytes(key.public_key().public_bytes(encoding, of_public))
    return private, public


@pytest.fixture(params=["ssh", "pem"])
def keys(request, tmp_path):
    """A private and a public key, and a public one of somebody else."""
    other = key_pair(tmp_path, "other", request.param)[1]
    return *key_pair(tmp_path, "own", request.param), other


def test_signature_is_checked_by_the_public_key(root, keys):
    private, public, other = keys
    certificate = certify(root, "demo", key=private)
    assert verified(root, certificate, signed_by=public).signer == f"signed by {public}"
    assert "not checked" in verified(root, certificate).signer
    with pytest.raises(UserError, match=f"is not signed by {other}"):
        verified(root, certificate, signed_by=other)


def test_changed_statement_is_not_signed(root, keys):
    private, public, _ = keys
    certificate = certify(root, "demo", key=private)
    envelope = read_json(root / certificate)
    said = json.loads(base64.b64decode(envelope["payload"]))
    said["predicate"]["run"] = "another"
    envelope["payload"] = base64.b64encode(json.dumps(said).encode()).decode()
    write_json(root / certificate, envelope)
    with pytest.raises(UserError, match="is not signed by"):
        verified(root, certificate, signed_by=public)


def test_unsigned_certificate_does_not_pass_for_a_signed_one(root, keys):
    with pytest.raises(UserError, match="is not signed by"):
        verified(root, certify(root, "demo"), signed_by=keys[1])


def test_file_that_is_no_key_is_named(root):
    with pytest.raises(UserError, match=r"export\.signing_key = '.*README.md': it cannot be read"):
        certify(root, "demo", key=Path(__file__).parents[2] / "README.md")


@pytest.mark.parametrize("content", ["{", "[1]", "{}", '{"payload": "?"}'])
def test_file_that_is_no_certificate_is_one_message(root, content):
    (root / "certificate.json").write_text(content)
    with pytest.raises(UserError, match=r"certificate\.json"):
        verified(root, Path("certificate.json"))


def test_certificate_that_is_not_there_is_told_in_words(root):
    with pytest.raises(UserError, match=r"'none\.json': there is no such file or folder\. Name"):
        verified(root, Path("none.json"))


def test_files_of_a_run_of_the_same_name_are_not_taken_for_those_of_a_published_one(root, tmp_path):
    """As where a certificate of somebody else's `demo` is verified in a project with an own one."""
    certificate = certify(root, "demo")
    published = tmp_path / "published"
    published.mkdir()
    shutil.copy(root / certificate, published)
    shutil.copy(root / "runs" / "demo" / "evaluate_run" / "items.json", published)
    edit(root / "runs" / "demo" / "consolidate" / "parity.json", lambda d: d.update(positions=1))
    assert len(verified(root, published / "certificate.json").absent) == 6


def test_margin_of_loss_is_judged_by_the_interval_and_overlap_is_counted(root):
    said = read_json(root / certify(root, "demo"))["predicate"]
    judged = said["required"]
    compared = said["measured"]["tuned"]["comparisons"]["base"]
    assert judged.keys() == {"heldout_loss", "heldout_loss/qa"}, "tasks are no held-out loss"
    assert judged["heldout_loss"] == {
        "gain": compared["loss_difference"],
        "gain_ci95": compared["loss_difference_ci95"],
        "met": True,
    }
    assert judged["heldout_loss/qa"]["gain"] == compared["sources"]["qa"]["loss_difference"]
    assert judged["heldout_loss/qa"]["met"] is False, "9 nats were asked for"
    assert said["overlap"] == {
        "pydocs_mc": {"items": 4, "too_short": 1, "not_clean": 2, "dirty": 1}
    }
