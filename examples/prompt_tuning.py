"""Trains a soft prompt for the demo model, whose blocks stay frozen on the servers.

    modelswarm up examples/counting.yaml
    python examples/prompt_tuning.py

Kill a server meanwhile, such as `pkill -9 -f counting-s1-r0`: that step takes longer, and its loss is the same.
The gateway's gRPC address is that of MODELSWARM_GATEWAY, by default 127.0.0.1:8001.
"""

import time

import torch
from transformers import AutoTokenizer

from modelswarm import AutoDistributedModelForCausalLM
from modelswarm.demo import counting_folder

STEPS = 60
QUESTION, ANSWER = "Who are you?", " A swarm."

tokenizer = AutoTokenizer.from_pretrained(counting_folder())
torch.manual_seed(1)
model = AutoDistributedModelForCausalLM.from_pretrained(
    "demo://counting", tuning_mode="ptune", pre_seq_len=32
)

question = tokenizer(QUESTION, return_tensors="pt")["input_ids"]
answer = tokenizer(ANSWER, add_special_tokens=False, return_tensors="pt")["input_ids"]
end = torch.tensor([[model.config.eos_token_id]])
ids = torch.cat((question, answer, end), dim=1)
labels = ids.clone()
labels[:, : question.shape[1]] = -100  # only the answer counts

weights = [weight for weight in model.parameters() if weight.requires_grad]
optimizer = torch.optim.AdamW(weights, lr=0.02)
for step in range(1, STEPS + 1):
    began = time.monotonic()
    loss = model(ids, labels=labels).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.4f} in {time.monotonic() - began:.2f} s", flush=True)

found = model.generate(question, max_new_tokens=answer.shape[1] + 1, do_sample=False)
print(tokenizer.decode(found[0], skip_special_tokens=True))
