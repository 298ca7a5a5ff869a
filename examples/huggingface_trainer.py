"""Fine-tuning under ``transformers.Trainer``, and the three lines that make the model small.

    pip install '.[hf]'
    python examples/huggingface_trainer.py

The model has the shape of BERT, and rows are drawn here, so that nothing is downloaded: is the
first word of a row the larger one?
"""

try:
    import transformers
except ModuleNotFoundError:
    raise SystemExit("this example needs transformers: pip install 'comera[hf]'") from None

import torch

import comera
from comera.integrations.transformers import learn_ranks_  # 1


def rows(count: int, seed: int) -> list[dict]:
    drawn = torch.randint(3, 100, (count, 2), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": pair, "labels": int(pair[0] > pair[1])} for pair in drawn]


def accuracy(prediction: transformers.EvalPrediction) -> dict[str, float]:
    right = prediction.predictions.argmax(-1) == prediction.label_ids
    return {"accuracy": float(right.mean())}


transformers.set_seed(0)
config = transformers.BertConfig(
    vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
    intermediate_size=256,
)  # fmt: skip
model = transformers.BertForSequenceClassification(config)
args = transformers.TrainingArguments(
    "trainer-run",
    max_steps=180,
    per_device_train_batch_size=64,
    learning_rate=3e-3,
    logging_steps=50,
    report_to=[],
    disable_tqdm=True,
)

layers = comera.TTConfig(rank=16, target_modules=r"bert\.encoder\..*", init="orthogonal")
comera.tensorize_(model, layers)  # 2
trainer = transformers.Trainer(
    model, args, train_dataset=rows(4096, 0), eval_dataset=rows(512, 1), compute_metrics=accuracy
)
learn_ranks_(trainer, comera.TwoStage(model, 0.6, early_steps=60, late_steps=60))  # 3
trainer.train()
print(trainer.evaluate())
trainer.save_model("small-bert")

again = transformers.AutoModelForSequenceClassification.from_pretrained("small-bert")
print(comera.compression_report(again))
