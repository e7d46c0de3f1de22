"""A recurrent classifier over sequences of different lengths, packed as nn.GRU wants them."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence


class SequenceClassifier(nn.Module):
    """Embeds, runs a bidirectional GRU, and classifies its last states."""

    def __init__(self, vocabulary: int, width: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=0)
        self.rnn = nn.GRU(width, width, num_layers=2, batch_first=True, bidirectional=True)
        self.classifier = nn.Linear(2 * width, classes)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Return logits [batch, classes] of ``tokens`` [batch, length], of which ``lengths`` [batch] count."""
        packed = pack_padded_sequence(self.embedding(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False)
        _, last = self.rnn(packed)
        forward, backward = last[-2], last[-1]
        return self.classifier(F.relu(forward + backward).repeat(1, 2))


def build() -> SequenceClassifier:
    """Return the model."""
    return SequenceClassifier(vocabulary=128, width=32, classes=4)


def loss(logits: Tensor, batch: list[Tensor]) -> Tensor:
    """Return the cross-entropy with a label that is the parity of each length."""
    return F.cross_entropy(logits, batch[1] % 2)
