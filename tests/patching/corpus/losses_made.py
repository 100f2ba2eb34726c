"""A loss's module made inside of forward, as Hugging Face's older models do, beside logits that are returned."""

from __future__ import annotations

import torch
import torch.nn as nn
from torch.nn import BCEWithLogitsLoss, CrossEntropyLoss, MSELoss

from tests.patching.corpus.entry import Entry
from tests.patching.corpus.losses import TOKENS, VOCAB, WIDTH, Body, pair, segmentation_batch

CE = (("", "cross_entropy"),)
LCE = (("", "linear_cross_entropy"),)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Body()
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.register_buffer("final_logits_bias", torch.randn(1, VOCAB))
        self.vocab_size, self.ignored, self.problem_type = VOCAB, 3, "single_label_classification"


class BartStyle(Model):
    """The bias of the logits is a buffer with a dimension more."""

    def forward(self, input_ids, labels=None):
        lm_logits = self.lm_head(self.model(input_ids))
        lm_logits = lm_logits + self.final_logits_bias.to(lm_logits.device)

        masked_lm_loss = None
        if labels is not None:
            labels = labels.to(lm_logits.device)
            loss_fct = CrossEntropyLoss()
            masked_lm_loss = loss_fct(lm_logits.view(-1, self.vocab_size), labels.reshape(-1))

        return {"loss": masked_lm_loss, "logits": lm_logits}


class MarianStyle(Model):
    def forward(self, input_ids, labels=None):
        lm_logits = self.lm_head(self.model(input_ids)) + self.final_logits_bias
        masked_lm_loss = None
        if labels is not None:
            loss_fct = CrossEntropyLoss()
            masked_lm_loss = loss_fct(lm_logits.view(-1, self.vocab_size), labels.reshape(-1))
        return (masked_lm_loss, lm_logits) if masked_lm_loss is not None else (lm_logits,)


class LearntRow(MarianStyle):
    """The bias gets a gradient of its own shape."""

    def __init__(self):
        super().__init__()
        del self.final_logits_bias
        self.final_logits_bias = nn.Parameter(torch.randn(1, 1, VOCAB))


class T5Style(Model):
    """The product is scaled before the head."""

    def forward(self, input_ids, labels=None):
        lm_logits = self.lm_head(self.model(input_ids) * (WIDTH**-0.5))
        loss_fct = CrossEntropyLoss(ignore_index=-100)
        loss = loss_fct(lm_logits.view(-1, lm_logits.size(-1)), labels.reshape(-1))
        return {"loss": loss, "logits": lm_logits}


class SoftCapped(Model):
    """The logits are of no product; settings of the loss are attributes, changed after it was made."""

    def forward(self, input_ids, labels):
        logits = 30.0 * torch.tanh(self.lm_head(self.model(input_ids)) / 30.0)
        loss_fct = nn.CrossEntropyLoss(label_smoothing=0.1, reduction="sum")
        loss_fct.ignore_index = self.ignored
        return loss_fct(logits.view(-1, VOCAB), labels.reshape(-1)) / 7, logits


class Squashed(Model):
    def logits(self, input_ids):
        return torch.tanh(self.lm_head(self.model(input_ids)))


class ByProblem(Squashed):
    """Which loss it is depends on the configuration: each branch makes its own."""

    def forward(self, input_ids, labels):
        logits = self.logits(input_ids)
        if self.problem_type == "regression":
            loss_fct = MSELoss()
            loss = loss_fct(logits.squeeze(), labels.squeeze())
        elif self.problem_type == "single_label_classification":
            loss_fct = CrossEntropyLoss()
            loss = loss_fct(logits.view(-1, VOCAB), labels.reshape(-1))
        else:
            loss_fct = BCEWithLogitsLoss()
            loss = loss_fct(logits, labels)
        return loss, logits


class ByBranchAbove(Squashed):
    """The loss is made outside of the branch that calls it."""

    def forward(self, input_ids, labels):
        logits = self.logits(input_ids)
        if self.problem_type == "regression":
            loss_fct = MSELoss()
            return loss_fct(logits.squeeze(), labels.squeeze()), logits
        loss_fct = CrossEntropyLoss(label_smoothing=0.2)
        with torch.enable_grad():
            if self.ignored is not None:
                loss = loss_fct(logits.view(-1, VOCAB), labels.reshape(-1))
            else:
                logits = logits.detach()
                loss = logits.mean()
        return loss, logits


class InOneExpression(Model):
    """Nothing holds the loss's module."""

    def forward(self, input_ids, labels):
        logits = self.lm_head(self.model(input_ids))
        loss = nn.CrossEntropyLoss(ignore_index=3)(logits.view(-1, VOCAB), labels.reshape(-1))
        return loss, logits


class InOneExpressionPlain(Model):
    def forward(self, input_ids, labels):
        logits = torch.tanh(self.lm_head(self.model(input_ids)))
        return CrossEntropyLoss()(logits.view(-1, VOCAB), labels.reshape(-1)), logits


class InOneExpressionSet(Model):
    """A setting is an attribute, that another may be given."""

    def forward(self, input_ids, labels):
        logits = torch.tanh(self.lm_head(self.model(input_ids)))
        return CrossEntropyLoss(ignore_index=self.ignored)(logits.view(-1, VOCAB), labels.reshape(-1)), logits


class Weighted(Squashed):
    """The classes' weights are a buffer: the loss's module holds a tensor, and is gone after the call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("class_weights", torch.rand(VOCAB) + 0.5)


class WeightedInOneExpression(Weighted):
    def forward(self, input_ids, labels):
        logits = self.logits(input_ids)
        loss = nn.CrossEntropyLoss(weight=self.class_weights)(logits.view(-1, VOCAB), labels.reshape(-1))
        return loss, logits


class WeightedByName(Weighted):
    """As a Trainer's compute_loss has it, in the model."""

    def forward(self, input_ids, labels):
        logits = self.logits(input_ids)
        loss_fct = nn.CrossEntropyLoss(weight=self.class_weights, ignore_index=self.ignored)
        loss = loss_fct(logits.view(-1, VOCAB), labels.reshape(-1))
        return loss, logits


class WeightedAnew(Squashed):
    """The weights are made in each step, of the batch."""

    def forward(self, input_ids, labels):
        logits = self.logits(input_ids)
        counts = torch.bincount(labels.flatten(), minlength=VOCAB)
        loss_fct = CrossEntropyLoss(1.0 / (counts + 1.0).to(logits.dtype), label_smoothing=0.1)
        return loss_fct(logits.view(-1, VOCAB), labels.reshape(-1)), logits


class WeightedAnewInOneExpression(Squashed):
    def forward(self, input_ids, labels):
        logits = self.logits(input_ids)
        return nn.CrossEntropyLoss(torch.linspace(0.5, 1.5, VOCAB, dtype=logits.dtype), reduction="sum")(
            logits.view(-1, VOCAB), labels.reshape(-1)
        ), logits


class WeightedNll(Weighted):
    def forward(self, input_ids, labels):
        logits = self.logits(input_ids).view(-1, VOCAB)
        criterion = nn.NLLLoss(self.class_weights)
        return criterion(nn.functional.log_softmax(logits, dim=-1), labels.reshape(-1)), logits


class WeightedHead(Weighted):
    """The logits are of one product, that nobody else reads."""

    def forward(self, input_ids, labels):
        logits = self.lm_head(self.model(input_ids))
        return nn.CrossEntropyLoss(weight=self.class_weights)(logits.view(-1, VOCAB), labels.reshape(-1))


class NamedSegmentation(nn.Module):
    """SegFormer: the logits are made larger, and the loss keeps its module's settings."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 7, kernel_size=1)
        self.ignored = 255

    def forward(self, image, mask):
        logits = self.conv(image)
        upsampled_logits = nn.functional.interpolate(logits, size=mask.shape[-2:], mode="bilinear", align_corners=False)
        loss_fct = CrossEntropyLoss(ignore_index=self.ignored)
        loss = loss_fct(upsampled_logits, mask)
        return loss, logits


class NllStyle(Model):
    def forward(self, input_ids, labels):
        logits = torch.tanh(self.lm_head(self.model(input_ids))).view(-1, VOCAB)
        criterion = nn.NLLLoss(ignore_index=self.ignored)
        return criterion(logits.log_softmax(-1), labels.reshape(-1)), logits


class QuestionAnswering(nn.Module):
    """One module, two losses of rows of positions."""

    def __init__(self):
        super().__init__()
        self.model, self.qa_outputs = Body(), nn.Linear(WIDTH, 2)

    def forward(self, input_ids, start_positions, end_positions):
        logits = self.qa_outputs(self.model(input_ids))
        start_logits, end_logits = logits.split(1, dim=-1)
        start_logits = start_logits.squeeze(-1).contiguous()
        end_logits = end_logits.squeeze(-1).contiguous()
        ignored_index = start_logits.size(1)
        loss_fct = CrossEntropyLoss(ignore_index=ignored_index)
        start_loss = loss_fct(start_logits, start_positions.clamp(0, ignored_index))
        end_loss = loss_fct(end_logits, end_positions.clamp(0, ignored_index))
        return (start_loss + end_loss) / 2, start_logits, end_logits


# --------------------------------------------------------------------------------------------------------------------
# What looks like it
# --------------------------------------------------------------------------------------------------------------------


class OneOfTwo(Squashed):
    def forward(self, input_ids, labels):
        loss_fct = CrossEntropyLoss()
        if self.ignored is None:
            loss_fct = nn.MultiMarginLoss()
        return loss_fct(self.logits(input_ids).view(-1, VOCAB), labels.reshape(-1))


class InALoop(Squashed):
    """The assignment before the call is not the last one at the second turn."""

    def forward(self, input_ids, labels):
        loss_fct, total = CrossEntropyLoss(), 0
        loss_fct = CrossEntropyLoss()
        for _ in range(self.ignored - 2):
            total = total + loss_fct(self.logits(input_ids).view(-1, VOCAB), labels.reshape(-1))
            loss_fct = nn.MultiMarginLoss()
        return total


class InATry(Squashed):
    """Where making one fails, another stays."""

    def forward(self, input_ids, labels):
        loss_fct = nn.MultiMarginLoss()
        try:
            loss_fct = CrossEntropyLoss()
        except RuntimeError:
            input_ids = input_ids + 1
        return loss_fct(self.logits(input_ids).view(-1, VOCAB), labels.reshape(-1))


class ByExpression(Squashed):
    def forward(self, input_ids, labels):
        made = (CrossEntropyLoss if self.ignored else nn.MultiMarginLoss)()
        return made(self.logits(input_ids).view(-1, VOCAB), labels.reshape(-1))


class Unpacked(Squashed):
    def __init__(self):
        super().__init__()
        self.settings = {"ignore_index": 3}

    def forward(self, input_ids, labels):
        return CrossEntropyLoss(**self.settings)(self.logits(input_ids).view(-1, VOCAB), labels.reshape(-1))


class WeightedOfTwo(Weighted):
    def forward(self, input_ids, labels):
        loss_fct = CrossEntropyLoss(weight=self.class_weights)
        if self.ignored is None:
            loss_fct = nn.MultiMarginLoss(weight=self.class_weights)
        return loss_fct(self.logits(input_ids).view(-1, VOCAB), labels.reshape(-1))


class WeightedMoved(Weighted):
    def forward(self, input_ids, labels):
        loss_fct = CrossEntropyLoss(weight=self.class_weights).to(labels.device)
        return loss_fct(self.logits(input_ids).view(-1, VOCAB), labels.reshape(-1))


class WeightedMovedInOneExpression(Weighted):
    def forward(self, input_ids, labels):
        logits = self.logits(input_ids).view(-1, VOCAB)
        return CrossEntropyLoss(weight=self.class_weights).to(labels.device)(logits, labels.reshape(-1))


class WeightedHooked(Weighted):
    def forward(self, input_ids, labels):
        loss_fct = CrossEntropyLoss(weight=self.class_weights)
        loss_fct.register_forward_hook(lambda module, given, output: output * 2)
        return loss_fct(self.logits(input_ids).view(-1, VOCAB), labels.reshape(-1))


class WeightedOwn(Weighted):
    def forward(self, input_ids, labels):
        return OwnLoss(weight=self.class_weights)(self.logits(input_ids).view(-1, VOCAB), labels.reshape(-1))


class WeightedUnpacked(Weighted):
    def forward(self, input_ids, labels):
        logits = self.logits(input_ids).view(-1, VOCAB)
        return CrossEntropyLoss(*(self.class_weights,))(logits, labels.reshape(-1))


class WeightedSummed(Weighted):
    """An argument of torch's past says that rows are added up."""

    def forward(self, input_ids, labels):
        logits = self.logits(input_ids).view(-1, VOCAB)
        return CrossEntropyLoss(self.class_weights, False)(logits, labels.reshape(-1))


class Summed(Squashed):
    def forward(self, input_ids, labels):
        return CrossEntropyLoss(size_average=False)(self.logits(input_ids).view(-1, VOCAB), labels.reshape(-1))


class NotReduced(Squashed):
    def forward(self, input_ids, labels):
        return CrossEntropyLoss(reduce=False)(self.logits(input_ids).view(-1, VOCAB), labels.reshape(-1)).sum()


class OwnLoss(CrossEntropyLoss):
    def forward(self, input, target):
        return super().forward(input * 0.5, target)


class Widened(Squashed):
    def forward(self, input_ids, labels):
        loss_fct = OwnLoss()
        return loss_fct(self.logits(input_ids).view(-1, VOCAB), labels.reshape(-1))


class MadeElsewhere(Squashed):
    """A method makes the loss, and another class may have another."""

    def make_loss(self):
        return CrossEntropyLoss()

    def forward(self, input_ids, labels):
        loss_fct = self.make_loss()
        return loss_fct(self.logits(input_ids).view(-1, VOCAB), labels.reshape(-1))


class Hooked(Squashed):
    def forward(self, input_ids, labels):
        loss_fct = CrossEntropyLoss()
        loss_fct.register_forward_hook(lambda module, given, output: output * 2)
        return loss_fct(self.logits(input_ids).view(-1, VOCAB), labels.reshape(-1))


class SoftTargets(Squashed):
    def forward(self, input_ids, labels):
        loss_fct = CrossEntropyLoss()
        targets = nn.functional.one_hot(labels, VOCAB).float() * 0.9
        return loss_fct(self.logits(input_ids).view(-1, VOCAB), targets.view(-1, VOCAB))


class BiasOfRows(Model):
    """What is added to the logits differs from token to token."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.randn(TOKENS, VOCAB))

    def forward(self, input_ids, labels):
        logits = self.lm_head(self.model(input_ids)) + self.rows
        loss_fct = CrossEntropyLoss()
        return loss_fct(logits.view(-1, VOCAB), labels.reshape(-1)), logits


class BiasOfOneNumber(Model):
    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.randn(1, 1))

    def forward(self, input_ids, labels):
        logits = self.lm_head(self.model(input_ids)) + self.shift
        loss_fct = CrossEntropyLoss()
        return loss_fct(logits.view(-1, VOCAB), labels.reshape(-1)), logits


class MoreDimensions(Model):
    """The sum has a dimension that the head's output has not."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(1, 1, 1, VOCAB))

    def forward(self, input_ids, labels):
        logits = self.lm_head(self.model(input_ids)) + self.bias
        loss_fct = CrossEntropyLoss()
        return loss_fct(logits[0].flatten(0, 1), labels.reshape(-1)), logits


def positions():
    return torch.randint(VOCAB, (2, TOKENS)), torch.randint(TOKENS + 2, (2,)), torch.randint(TOKENS + 2, (2,))


def entry(name, build, sites, batch=pair, **more):
    return Entry(name, lambda: (build(), batch()), sites, **more)


ENTRIES = [
    entry("made_bart", BartStyle, LCE),
    entry("made_marian", MarianStyle, LCE),
    entry("made_bias_is_learnt", LearntRow, LCE),
    entry("made_t5", T5Style, LCE),
    entry("made_capped", SoftCapped, CE),
    entry("made_by_problem", ByProblem, CE),
    entry("made_above_the_branch", ByBranchAbove, CE),
    entry("made_in_one_expression", InOneExpression, LCE),
    entry("made_in_one_expression_plain", InOneExpressionPlain, CE),
    entry("made_in_one_expression_set", InOneExpressionSet, CE),
    entry("made_weighted_in_one_expression", WeightedInOneExpression, CE),
    entry("made_weighted_by_name", WeightedByName, CE),
    entry("made_weighted_anew", WeightedAnew, CE),
    entry("made_weighted_anew_in_one_expression", WeightedAnewInOneExpression, CE),
    entry("made_weighted_nll", WeightedNll, CE),
    entry("made_weighted_head", WeightedHead, LCE),
    entry("made_segformer", NamedSegmentation, CE, segmentation_batch),
    entry("made_nll", NllStyle, CE),
    entry("made_question_answering", QuestionAnswering, (*CE, *CE), positions),
    entry("like_made_in_a_loop", InALoop, (), refused="different modules"),
    entry("like_made_in_a_try", InATry, (), refused="different modules"),
    entry("like_made_by_an_expression", ByExpression, (), refused="different modules"),
    entry("like_made_of_unpacked_settings", Unpacked, (), refused="arguments"),
    entry("like_made_weighted_of_two", WeightedOfTwo, (), refused="different modules"),
    entry("like_made_weighted_and_moved", WeightedMoved, (), refused="different modules"),
    entry("like_made_weighted_and_moved_in_one", WeightedMovedInOneExpression, (), refused="specifies its weight"),
    entry("like_made_weighted_and_hooked", WeightedHooked, (), refused="hooks"),
    entry("like_made_weighted_of_an_own_class", WeightedOwn, (), refused="own name"),
    entry("like_made_weighted_unpacked", WeightedUnpacked, (), refused="arguments"),
    entry("like_made_weighted_summed", WeightedSummed, (), refused="arguments"),
    entry("like_made_summed", Summed, (), refused="arguments"),
    entry("like_made_not_reduced", NotReduced, (), refused="arguments"),
    entry("like_made_one_of_two", OneOfTwo, (), refused="different modules"),
    entry("like_made_of_an_own_class", Widened, (), refused="OwnLoss"),
    entry("like_made_by_a_method", MadeElsewhere, (), refused="different modules"),
    entry("like_made_and_hooked", Hooked, (), refused="hooks"),
    entry("like_made_with_soft_targets", SoftTargets, (), refused="probabilities"),
    entry("like_bias_of_rows", BiasOfRows, CE, refused="add"),
    entry("like_bias_of_one_number", BiasOfOneNumber, CE, refused="add"),
    entry("like_bias_of_more_dimensions", MoreDimensions, CE, refused="add"),
]
