// In lunr a hyphen before a word excludes it, and two are an error: a search for --fp16 means the option.
const send = Worker.prototype.postMessage;
Worker.prototype.postMessage = function (message, ...more) {
  const query = typeof message?.data === "string";
  const plain = query ? { ...message, data: message.data.replace(/(^|\s)-+(?=\w)/g, "$1") } : message;
  send.call(this, plain, ...more);
};
