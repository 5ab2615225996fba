"""Real megatron-core models on a CPU: no CUDA, no Transformer Engine, one process or several with gloo.

For demos and tests. Forward, backward and the optimizer's step of tiny GPT (grouped-query), MLA and DSA models run on
megatron-core 0.16.1, 0.17.1, 0.18.2, 0.19.0 and 0.19.2 with megatron's own modules, DDP, schedules, optimizer and
sharded checkpoints; only what CUDA or Transformer Engine must provide is replaced, and put back afterwards.

    from mcore_patches.cpu.data import random_batch
    from mcore_patches.cpu.models import build_gpt, gpt_config, gqa_attention_spec
    from mcore_patches.cpu.parallel import model_parallel
    from mcore_patches.cpu.training import train_step

    with model_parallel():
        config = gpt_config()
        model = build_gpt(config, gqa_attention_spec(config))
        print(train_step(model, random_batch()).loss)

Modules
-------
shim        ``cpu_megatron()``, ``enable()``, ``disable()``: the rebindings, each with its reason.
parallel    ``model_parallel()``, ``init_model_parallel()``, ``destroy()``: gloo and megatron's groups.
models      ``build_gpt(config, attention spec)`` and all config and spec builders (from configs and specs).
hybrid      ``build_hybrid(config, attention specs, pattern)``, from 0.18.
data        ``random_batch()``, ``packed_batch()`` (THD), and their context-parallel shards.
training    ``train_step()`` on a plain model; ``wrap_with_ddp()``, ``build_optimizer()``, ``schedule_step()``.
parameters  ``seed_parameters()``, ``full_parameters()``, ``full_gradients()``: the same in every parallel layout.
checkpoint  ``save_checkpoint()``, ``load_checkpoint()``: sharded, from one layout to another.
launch      ``run("module:function", nprocs=, release=)``, also a command line and a torchrun target.

A new kind of attention needs a spec and nothing else: ``build_gpt`` takes one self-attention spec for all layers, or
one for each; ``stage_block_spec`` takes finished layer specs, for instance those that megatron's
``get_transformer_layer_with_experimental_attention_variant_spec(config, backend=CpuBackend())`` returns.

What works, and how exactly
---------------------------
Every layout equals one process in fp32: loss and gradients within 2e-6 relative for TP2 with sequence parallelism,
PP2 (also interleaved), DP2, CP2, TP2 x CP2, packed documents, full and selective recomputation. The exceptions are
megatron's own, found with this harness:

* Gradients of the DSA indexer up to 0.18: times the number of microbatches (no schedule sets the loss scale) and,
  with tensor and sequence parallelism, times the tensor-parallel size (summed where 0.19 averages).
* 0.19, context parallelism: gradients of the indexer are times the context-parallel size unless
  ``calculate_per_token_loss``, whichever form the loss function has; the patch ``dsa_cp_gradient`` corrects it.
* 0.19, packed documents with padding: the indexer's loss counts the padding.
* MLA with tensor but without sequence parallelism: the gradient of the shared rotary key is not summed over the
  tensor-parallel ranks, so that the rotary rows of ``linear_kv_down_proj`` and all that lies below the attention get
  gradients that are 10 to 80 % off and differ between the ranks; that of the query latent's norm is times the
  tensor-parallel size. Absorbed MLA refuses this layout; use ``sp=True``.

DSA with context parallelism or packed documents, fused backends, NoPE (``qk_pos_emb_head_dim=0``) and selective
recomputation of ``core_attn`` need 0.19; hybrid models need 0.18.

Not possible on a CPU: mixed-precision and distributed optimizers, gradient clipping, Transformer Engine's modules, the
kernels themselves.

Traps
-----
* The shim belongs to the thread that turned it on. Torch suspends function modes during ``backward``; the shim
  re-enters its own, as recomputed layers ask for CUDA there.
* ``tilelang_dsa.SparseMLA`` is not None wherever TileLang is installed: it says nothing about a GPU. The TileLang
  indexer does not decline CPU tensors, it fails: use ``fused_indexer_declined()``. The fused attention hook declines
  NoPE (512 wide), a number of tokens that is no multiple of 64, and fp32; what it supports it compiles, for CUDA.
* ``dsa_kernel_backend="tilelang"`` is refused without CUDA when the config is built, not later:
  ``dsa_config(kernel_backend=...)`` sets it afterwards.
* The DSA indexer in fp32 cannot rotate its activations (bf16 only): see ``dsa_config``. In bf16 another rounding
  selects other tokens, so that layouts agree only where every token is selected.
* ``torch.topk`` leaves ties open, and the indexer's ReLU makes ties: ``dsa_indexer_scoring_relu=False`` (0.19) or
  ``dsa_indexer_topk`` of the whole sequence, where two layouts of the keys are compared.
* ``DSAIndexerLossAutoScaler`` and ``DSAIndexerLossLoggingHelper`` keep state in the class: a scale left by a schedule
  changes the next plain step, a plain step breaks the next schedule of 0.19, and the log has as many entries as the
  first model had layers. ``train_step`` and ``schedule_step`` start afresh.
* Megatron's ``WrappedTorchNorm`` refuses sequence parallelism, its ``DotProductAttention`` MLA's arguments, and
  ``ColumnParallelLinear`` is no duplicated down projection; :mod:`layers <mcore_patches.cpu.layers>` and
  :mod:`specs <mcore_patches.cpu.specs>` have stand-ins.
* 0.16 takes the mock in place of Transformer Engine for the package (``HAVE_TE``). The hybrid stack builds its final
  norm from a global, not from the spec.
* From 0.18 ``megatron.core.__version__`` carries ``+<commit>`` of a git repository around the installation.
* Saving a checkpoint starts a manager process that imports ``__main__``: scripts need their ``if __name__`` guard.
"""
