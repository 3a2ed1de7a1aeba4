#!/usr/bin/env bash
# A synchronous GRPO run, as users of verl write them: variables, arithmetic, an array, an `if`.
set -x
NNODES=${NNODES:-2}
MODEL=${MODEL:-Qwen/Qwen2.5-7B-Instruct}
project=math exp_name="$(basename "$MODEL")-grpo"
prompt_len=$((1024 * 2))
response_len=4096
max_tokens=$(((prompt_len + response_len) * 2))
if [ "$1" = long ]; then
    response_len=16384
fi
DATA=(
    data.train_files="['$HOME/data/gsm8k/train.parquet','$HOME/data/math/train.parquet']"
    data.val_files=$HOME/data/gsm8k/test.parquet
    data.train_batch_size=512
    data.max_prompt_length=${prompt_len}
    data.max_response_length=${response_len} # of all turns
    data.filter_overlong_prompts=True
)

python3 -m verl.trainer.main_ppo --config-path=config --config-name='ppo_trainer' \
    algorithm.adv_estimator=grpo \
    algorithm.norm_adv_by_std_in_grpo=False \
    "${DATA[@]}" \
    actor_rollout_ref.model.path=$MODEL \
    +actor_rollout_ref.model.override_config.max_position_embeddings=32768 \
    actor_rollout_ref.actor.optim.lr=2e-6 \
    actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$max_tokens \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=2 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.005 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl+ \
    actor_rollout_ref.actor.clip_ratio_low=0.2 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.clip_ratio_c=10.0 \
    actor_rollout_ref.actor.loss_agg_mode="seq-mean-token-sum-norm" \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.val_kwargs.do_sample=True \
    actor_rollout_ref.rollout.val_kwargs.temperature=0.6 \
    actor_rollout_ref.rollout.val_kwargs.n=4 \
    trainer.val_before_train=False \
    custom_reward_function.path=rewards/math_reward.py \
    custom_reward_function.name=score \
    trainer.logger='["console","wandb"]' \
    trainer.project_name="$project" \
    trainer.experiment_name="$exp_name" \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes=$NNODES \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    trainer.total_training_steps=200 \
    trainer.default_local_dir=$CHECKPOINTS/$exp_name $@ 2>&1 | tee run.log
