"""What `scan-checkpoint` finds about the files themselves."""

from __future__ import annotations

from nanprobe.catalogue.entry import Entry, Family, Reference

__all__ = ["CHECKPOINT_FILES"]

CHECKPOINT_FILES = Family(
    title="Files of a checkpoint",
    about="What `scan-checkpoint` finds about the files themselves.",
    entries=(
        Entry(
            name="unsafe-pickle",
            kind="rule",
            meaning="the file names code that would run when it is unpickled",
            what=(
                "A pickle inside the file refers to something that executes code, starts processes, imports modules "
                "or opens files. nanprobe only read the name; nothing was run."
            ),
            why=(
                "A malicious file, or a whole object that was saved with a custom way to rebuild itself. Unknown "
                "classes that do none of this are notes."
            ),
            looks_like=(
                "An error with the name in full, such as `os.system`; scanning goes on, since nothing in a file is "
                "ever executed."
            ),
            what_to_try=(
                "Do not load it with `torch.load(weights_only=False)` or any other reader that trusts pickles.",
                "Ask its author for safetensors.",
                "Where it came from yourself, save a state dict instead of the object.",
            ),
            what_not_to_try=(
                "Passing `weights_only=False` because an error message suggests it.",
                "Trusting a file because a virus scanner does: few look into pickles.",
            ),
            references=(
                Reference(
                    issue="pytorch/pytorch#189308",
                    says="reading a distributed checkpoint's metadata runs its pickle",
                ),
                Reference(issue="mmaitre314/picklescan#25", says="lists of bad names always have to be extended"),
            ),
            related=(
                "corrupt-file",
                "not-scanned",
            ),
        ),
        Entry(
            name="corrupt-file",
            kind="rule",
            meaning="the file is not what its name or header says",
            what=(
                "A header that is impossible, a checksum that does not match, offsets outside the file, a Git LFS "
                "pointer or an HTML page in place of a checkpoint, or a path that leads out of the checkpoint's "
                "folder."
            ),
            why=(
                "A download that stored an error page, a clone without LFS, a disk or a copy that flipped bits, a "
                "writer that was interrupted, or a file made to deceive a reader."
            ),
            looks_like="An error whose message says what the file is instead, or which tensor's bytes are wrong.",
            what_to_try=(
                "Copy or download it again, and compare hash and size.",
                "With an LFS pointer, run `git lfs pull`.",
                "If the fresh copy is damaged as well, ask whoever published it.",
            ),
            what_not_to_try=(
                (
                    "Loading it all the same: PyTorch does not check the checksums, and a flipped byte loads without "
                    "complaint."
                ),
                "Repairing the header by hand.",
            ),
            references=(
                Reference(issue="EricTan7/VeritasPP#2", says="shards whose first eight bytes are zero"),
                Reference(
                    issue="Comfy-Org/ComfyUI#15602",
                    says="trailing bytes that one loader accepts and another refuses",
                ),
                Reference(issue="ikawrakow/ik_llama.cpp#2437", says="tensors whose tail is read from the next one"),
            ),
            related=(
                "truncated-file",
                "index-mismatch",
                "unsafe-pickle",
            ),
        ),
        Entry(
            name="truncated-file",
            kind="rule",
            meaning="the file ends before its data does",
            what="The header promises more bytes than there are. Tensors near the end are cut off or missing.",
            why="A full disk, an interrupted download or upload, a job that was killed while it saved, a quota.",
            looks_like=(
                "An error that says how many bytes are missing and for which tensor; tensors that are whole are "
                "scanned all the same."
            ),
            what_to_try=(
                "Copy or download it again; check the free space and the quota.",
                "Save under a temporary name and rename when the file is complete.",
                "Go back to the checkpoint before.",
            ),
            what_not_to_try=(
                "Memory-mapping it: a reader may see zeros or garbage for the missing part.",
                "Padding the file: the values are gone.",
            ),
            references=(
                Reference(
                    issue="ultralytics/ultralytics#5793",
                    says="a full disk, and an archive without its directory",
                ),
                Reference(issue="osaurus-ai/vmlx-swift#217", says="short shards that load as zeros or garbage"),
            ),
            related=(
                "corrupt-file",
                "missing-shard",
                "dead-rows",
            ),
        ),
        Entry(
            name="missing-shard",
            kind="rule",
            meaning="a file that the checkpoint consists of is not there",
            what=(
                "The index, the numbering of the shards, or the metadata names a file that does not exist. Its "
                "tensors cannot be loaded."
            ),
            why=(
                "An incomplete download, a save that one process did not finish, a cleaning job, an index that is "
                "older than the files."
            ),
            looks_like=(
                "An error with the names of the files, and the tensors that are in none of the others. A Megatron "
                "save without its last-written `metadata.json` is a warning."
            ),
            what_to_try=(
                "Fetch the missing files again.",
                "If the save did not finish, use the checkpoint before it.",
                "Compare the number of files with the number of processes that saved.",
            ),
            what_not_to_try=(
                "Loading with `strict=False`: the weights stay as they were allocated.",
                "Deleting the names from the index.",
            ),
            references=(
                Reference(issue="sgl-project/sglang#32279", says="a missing shard that leaves weights uninitialised"),
                Reference(issue="Neph0s/CoSER#3", says="an index of 30 shards of which 15 exist"),
                Reference(issue="NVIDIA/Megatron-LM#4378", says="a checkpoint that lacks shards"),
            ),
            related=(
                "index-mismatch",
                "missing-key",
                "uninitialized",
            ),
        ),
        Entry(
            name="index-mismatch",
            kind="rule",
            meaning="the index and the files disagree",
            what=(
                "The index says that a tensor is in one file and it is in another, in none, or in several; or files "
                "lie beside it that it does not know."
            ),
            why=(
                "Files of two revisions in one folder, an index that was not written again after a conversion, a "
                "stray copy of the whole model beside its shards."
            ),
            looks_like="An error when it touches a tensor, otherwise a warning; the message names tensor and file.",
            what_to_try=(
                "Fetch index and shards of one and the same revision into an empty folder.",
                "Write the index again from the files.",
                "Remove stray files that no index names.",
            ),
            what_not_to_try=("Letting the loader choose: which copy it takes depends on the library.",),
            references=(
                Reference(issue="Blaizzy/mlx-vlm#1827", says="an old index beside newer files"),
                Reference(issue="Neph0s/CoSER#3", says="an index that names files of another export"),
            ),
            related=(
                "missing-shard",
                "corrupt-file",
                "unexpected-key",
            ),
        ),
        Entry(
            name="storage-bloat",
            kind="rule",
            meaning="a small view was saved together with its large storage",
            what=(
                "A tensor uses a small part of the storage that is saved with it. The file is larger than its "
                "tensors, and so is memory after loading."
            ),
            why=(
                "`torch.save` keeps storages whole, so that tensors which share one still do after loading. A slice, "
                "a chunk or one row drags everything along."
            ),
            looks_like="A warning with the bytes of the storage and the bytes that tensors use.",
            what_to_try=(
                "Save `tensor.clone()` instead of the view.",
                "Save in safetensors, which stores tensors and no storages.",
            ),
            what_not_to_try=(
                "Deleting the large tensor before saving: the view keeps its storage alive.",
                "`contiguous()`: a slice of leading rows is contiguous already and stays a view.",
            ),
            references=(
                Reference(issue="pytorch/pytorch#1995", says="saving ten elements stores a hundred million"),
                Reference(issue="pytorch/pytorch#40157", says="why a slice is saved with its whole storage"),
            ),
            related=("not-scanned",),
        ),
        Entry(
            name="not-scanned",
            kind="rule",
            meaning="something of the checkpoint was not looked at",
            what=(
                "A file, a tensor or an object was left out, and the finding says why. A clean result does not speak "
                "for it."
            ),
            why=(
                "An element type or block format that is not known, an optional package that is not installed, a file "
                "without tensors, objects of unknown classes that were read as plain data, a file that changed "
                "meanwhile."
            ),
            looks_like=(
                "A warning where values are missing from the scan, a note where there were none to miss. The summary "
                "counts scanned, skipped and unreadable tensors."
            ),
            what_to_try=(
                "Read the reason; for GGUF block formats install the extra: `pip install nanprobe[gguf]`.",
                "Scan again when nothing writes to the file.",
                "Convert the tensor to a type that is known.",
            ),
            what_not_to_try=("Reading the absence of errors as a clean bill for what was not scanned.",),
            references=(
                Reference(issue="protectai/modelscan#290", says="a scanner that skips files without saying so"),
                Reference(issue="protectai/modelscan#134", says="formats that are not looked into"),
            ),
            related=(
                "unsafe-pickle",
                "corrupt-file",
            ),
        ),
    ),
)
"""Files of a checkpoint."""
