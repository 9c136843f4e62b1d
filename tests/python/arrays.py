"""Arrays into batches, tensors out of models."""
import array
import unittest

import numpy as np

import glm52
import small


class OldTensor:
    """A framework of before DLPack 1: numpy's own capsule behind it, and no array interface."""

    def __init__(self, values, device=(1, 0)):
        self.values, self.device = values, device

    def __dlpack__(self, stream=None):
        return self.values.__dlpack__()

    def __dlpack_device__(self):
        return self.device


class Batches(unittest.TestCase):
    def setUp(self):
        self.context = glm52.Context(threads=1)
        self.addCleanup(self.context.close)

    def test_all_kinds_of_arrays(self):
        ids = small.tokens()
        for given in (ids, ids.astype(np.int32), ids.astype(np.uint8), ids.astype(np.uint16), ids.tolist(),
                      tuple(ids.tolist()), array.array("q", ids.tolist()), memoryview(ids.astype(np.int32)),
                      np.repeat(ids, 2)[::2], OldTensor(ids.copy())):
            batch = glm52.Batch(self.context, given)
            self.assertEqual(batch["tokens"].tolist(), ids.tolist())
        self.assertEqual((len(batch), batch.documents), (40, 1))

    def test_masks(self):
        for mask in (np.ones(40, bool), np.ones(40), np.ones(40, np.float16), np.ones(40, np.uint8), [1.0] * 40,
                     [True] * 40):
            batch = glm52.Batch(self.context, small.tokens(), loss_mask=mask, row_mask=mask)
            self.assertEqual(batch["loss_mask"].tolist(), [1.0] * 40)

    def test_fields_are_copies(self):
        ids = small.tokens()
        batch = glm52.Batch(self.context, ids, cu_seqlens=[0, 10, 40])
        first = int(ids[0])
        ids[0] = batch["tokens"][1] = 36
        self.assertEqual(batch["tokens"][0], first)
        self.assertEqual(batch["cu_seqlens"].tolist(), [0, 10, 40])
        self.assertEqual(int(batch["labels"][9]), -100)

    def test_mistakes(self):
        ids = small.tokens()
        for fields, message in (
                ({"tokens": ids.astype(float)}, "tokens has dtype float64, it must hold integers"),
                ({"tokens": ids.reshape(5, 8)}, r"tokens has shape \(5, 8\), it must have one dimension"),
                ({"tokens": "text"}, "tokens has (shape|dtype)"),
                ({"tokens": [object()]}, "tokens is a list, which is no array of numbers"),
                ({"tokens": np.array([2**63], np.uint64)}, "which is no token"),
                ({"tokens": OldTensor(ids, (2, 0))}, "tokens lies on a device"),
                ({"tokens": []}, "it must hold integers|0 values"),
                ({"tokens": ids, "cu_seqlens": [0, 10]}, r"cu_seqlens\[1\] = 10"),
                ({"tokens": ids, "cu_seqlens": [0.0, 40.0]}, "cu_seqlens has dtype float64"),
                ({"tokens": ids, "loss_mask": np.ones(39)}, "loss_mask has 39 values"),
                ({"tokens": ids, "loss_mask": np.ones(40, complex)}, "loss_mask has dtype complex128"),
                ({"loss_mask": np.ones(40)}, "tokens")):
            with self.assertRaisesRegex(glm52.InvalidError if fields.get("tokens") is not None else glm52.Error,
                                        message):
                glm52.Batch(self.context, **fields)
        with self.assertRaises(TypeError):
            glm52._glm52.batch_set(glm52.Batch(self.context)._handle, "tokens",
                                   (glm52._glm52.DTYPE_I64, ids.astype(np.int32)))
        with self.assertRaisesRegex(glm52.InvalidError, "vocabulary|token"):
            small.model(self.context).forward(glm52.Batch(self.context, [99]))


class Tensors(unittest.TestCase):
    def setUp(self):
        self.context = glm52.Context(threads=1)
        self.addCleanup(self.context.close)

    def test_views_share_memory(self):
        model = small.model(self.context)
        parameter = model[small.WEIGHT]
        view = parameter.numpy()
        self.assertEqual((view.shape, view.dtype), ((30, 14), np.float32))
        view[0, 0] = 42
        for other in (np.from_dlpack(parameter), np.asarray(parameter), model[small.WEIGHT].numpy()):
            self.assertTrue(np.shares_memory(view, other))
            self.assertEqual(other[0, 0], 42)
        self.assertEqual(parameter.numpy("f64").dtype, np.float64)
        self.assertFalse(np.shares_memory(view, parameter.numpy("f64")))

    def test_read_only_where_an_optimizer_owns_it(self):
        model, step = small.trainer(self.context)
        parameter = model[small.WEIGHT]
        view = parameter.numpy()
        with self.assertRaises(ValueError):
            view[0, 0] = 1
        self.assertFalse(np.from_dlpack(parameter).flags.writeable)
        self.assertFalse(parameter.gradient.numpy().flags.writeable)
        step.close(), step.optimizer.close()
        self.assertTrue(parameter.numpy().flags.writeable)

    def test_assign_reaches_the_optimizer(self):
        for params in ("f32", "bf16"):
            model, step = small.trainer(self.context, precision={"params": params})
            parameter = model[small.WEIGHT]
            parameter.assign(np.full((30, 14), 0.5))
            step.run(small.batch(self.context))
            after = parameter.numpy("f32")
            self.assertLess(np.abs(after - 0.5).max(), 0.05)
            self.assertTrue((after != 0.5).any())
            with self.assertRaisesRegex(glm52.InvalidError, r"has shape \[30, 14\], the values have \[14, 30\]"):
                parameter.assign(np.ones((14, 30)))

    def test_capsules(self):
        tensor = small.model(self.context)[small.WEIGHT].value
        self.assertEqual(tensor.__dlpack_device__(), (1, 0))
        self.assertIn('"dltensor"', repr(tensor.__dlpack__()))
        self.assertIn('"dltensor"', repr(tensor.__dlpack__(max_version=(0, 8))))
        self.assertIn('"dltensor_versioned"', repr(tensor.__dlpack__(max_version=(1, 1), dl_device=(1, 0), copy=False)))
        for wishes in ({"stream": 1}, {"dl_device": (2, 0)}, {"copy": True}):
            with self.assertRaises(BufferError):
                tensor.__dlpack__(**wishes)

    def test_versioned_capsule_says_read_only(self):
        import ctypes

        class Versioned(ctypes.Structure):
            _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("owner", ctypes.c_void_p),
                        ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("data", ctypes.c_void_p)]

        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        model = small.model(self.context)
        owner = None
        for read_only in (0, 1):
            capsule = model[small.WEIGHT].__dlpack__(max_version=(1, 0))
            found = Versioned.from_address(pointer(capsule, b"dltensor_versioned"))
            self.assertEqual((found.major, found.flags & 1), (1, read_only))
            self.assertEqual(found.data, model[small.WEIGHT].numpy().ctypes.data)
            owner = owner or glm52.Optimizer(model)  # of the values from now on

    def test_bf16(self):
        model = small.model(self.context, precision={"params": "bf16"})
        parameter = model[small.WEIGHT]
        self.assertEqual(parameter.dtype, "bf16")
        with self.assertRaisesRegex(glm52.InvalidError, "numpy has no bf16"):
            parameter.numpy()
        wide, bits = parameter.numpy(dtype="f32"), parameter.numpy(dtype="u16")
        self.assertEqual(((wide.view(np.uint32) >> 16) == bits).all() and wide.std() > 0.1, True)
        self.assertTrue((np.asarray(parameter) == wide).all())
        values = np.random.RandomState(5).randn(30, 14).astype(np.float32)
        parameter.assign(values)
        self.assertLess(np.abs(parameter.numpy("f32") / values - 1).max(), 2.0**-8)
        self.assertIn('"dltensor"', repr(parameter.__dlpack__()))

    def test_names(self):
        model = small.model(self.context)
        self.assertIn(small.WEIGHT, model)
        self.assertNotIn("nothing", model)
        self.assertEqual(model[0].name, next(iter(model)))
        self.assertEqual(model[-1].name, model.keys()[-1])
        self.assertEqual(sum(p.size for p in model.parameters()), model.size)
        with self.assertRaisesRegex(KeyError, "no parameter nothing"):
            model["nothing"]
        with self.assertRaises(IndexError):
            model[len(model)]
        with self.assertRaisesRegex(glm52.StateError, "has no gradient"):
            model[small.WEIGHT].gradient

    def test_torch(self):
        try:
            import torch
        except ImportError:
            self.skipTest("there is no torch")
        parameter = small.model(self.context)[small.WEIGHT]
        self.assertEqual(float(torch.from_dlpack(parameter).sum()), float(torch.from_numpy(parameter.numpy()).sum()))


class Forward(unittest.TestCase):
    def test_outputs(self):
        with glm52.Context(threads=1) as context:
            model, batch = small.model(context), small.batch(context)
            found = model.forward(batch, "loss logits topk.* router_idx.1 hidden.0")
            self.assertEqual(found["logits"].shape, (40, 37))
            self.assertEqual(found["topk.1"].shape, (40, 5))
            self.assertEqual(found["router_idx.1"].shape, (40, 2))
            self.assertEqual(found["loss"].shape, ())
            logits, labels = found["logits"].astype(float), batch["labels"]
            rows = labels >= 0
            top = logits.max(1)
            ce = top + np.log(np.exp(logits - top[:, None]).sum(1)) - logits[np.arange(40), np.maximum(labels, 0)]
            self.assertAlmostEqual(ce[rows].mean(), float(found["loss"]), 5)
            self.assertAlmostEqual(glm52.Step(model).evaluate(batch), float(found["loss"]), 5)
            with self.assertRaisesRegex(glm52.InvalidError, "no output nonsense"):
                model.forward(batch, ["nonsense"])

    def test_generate(self):
        with glm52.Context(threads=1) as context:
            model = small.model(context)
            one = model.generate([1, 2, 3], 7, temperature=0.9, seed=4)
            self.assertEqual((one.dtype, one.shape), (np.int32, (7,)))
            self.assertEqual(one.tolist(), model.generate(np.array([1, 2, 3]), 7, temperature=0.9, seed=4).tolist())
            self.assertEqual(model.generate([1], 0).shape, (0,))
            for wrong in ([99], [], [2**40]):
                with self.assertRaises(glm52.InvalidError):
                    model.generate(wrong, 3)
