MODEL_PATH=Qwen/Qwen2.5-VL-3B-Instruct

python3 -m verl.trainer.main \
    config=easyr1/config.yaml \
    data.train_files=owner/geometry@train \
    worker.actor.model.model_path=${MODEL_PATH} \
    worker.actor.loss_type=cispo \
    worker.actor.clip_ratio_high=4.0 \
    worker.rollout.tensor_parallel_size=2 \
    algorithm.disable_kl=True \
    trainer.n_gpus_per_node=4
